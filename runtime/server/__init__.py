"""The engine over HTTP, with OpenAI's API.

settings.py                         ServerSettings: address, key, limits
protocol.py                         requests and responses as pydantic models
api_errors.py                       errors in OpenAI's form
gate.py                             host, key, and limits of bodies, before a request is read
calls.py                            one HTTP call as requests to the engine: sent, streamed, aborted
answers.py, endpoints.py            the two endpoints: parameters in, answers out
metrics.py                          the engine's counts as Prometheus text
app.py                              the FastAPI application: routes and shared state
serving.py                          the process: listens, watches the engine, ends in order
"""
