"""What puts the runtime's parts into other engines: operators and communication, into SGLang."""
