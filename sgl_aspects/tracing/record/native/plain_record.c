/* Whether a record can be given to marshal, which may crash on anything but plain values. */

#include "native.h"

PyObject *
is_plain(PyObject *module, PyObject *record)
{
    if (!PyBytes_CheckExact(record)) {
        PyErr_SetString(PyExc_TypeError, "is_plain() takes bytes");
        return NULL;
    }
    const unsigned char *at = (const unsigned char *)PyBytes_AS_STRING(record);
    const unsigned char *end = at + PyBytes_GET_SIZE(record);
    while (at < end) {
        unsigned char kind = *at++;
        Py_ssize_t left = end - at;
        if (strchr("NTF0{", kind) && kind)
            continue;
        if (kind == 'i' || kind == 'g') {
            left -= kind == 'i' ? 4 : 8;
        }
        else {
            if (left < 4 || !kind || !strchr("ul([", kind))
                Py_RETURN_FALSE;
            int64_t count = (int32_t)(at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24);
            if (kind == 'l') /* digits of 15 bits, and the number's sign */
                count = 2 * (count < 0 ? -count : count);
            at += 4;
            left -= 4;
            if (count < 0 || count > left) /* an item takes a byte at least */
                Py_RETURN_FALSE;
            if (kind == 'u' || kind == 'l')
                left -= count;
        }
        if (left < 0)
            Py_RETURN_FALSE;
        at = end - left;
    }
    Py_RETURN_TRUE;
}
