//! The configuration that all sessions of one kind share.

use std::ptr;
use std::ptr::NonNull;
use std::sync::OnceLock;

use openssl_sys as openssl;

use crate::callbacks;
use crate::error::{TlsError, TlsFailure};
use crate::ffi;

/// An `SSL_CTX`. Its sessions keep it alive, so that it may be dropped before them.
pub(crate) struct Context(NonNull<openssl::SSL_CTX>);

// SAFETY: OpenSSL 3 locks what sessions of several threads share of a context. It is not changed after its
// creation.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Client,
    Server,
}

/// Both suites; a session is limited to its key's.
const SUITES: &std::ffi::CStr = c"TLS_AES_256_GCM_SHA384:TLS_AES_128_GCM_SHA256";

impl Context {
    /// The context of all clients, or of all servers.
    pub(crate) fn of(side: Side) -> Result<&'static Context, TlsError> {
        static CLIENT: OnceLock<Option<Context>> = OnceLock::new();
        static SERVER: OnceLock<Option<Context>> = OnceLock::new();
        let context = match side {
            Side::Client => CLIENT.get_or_init(|| Context::new(side)),
            Side::Server => SERVER.get_or_init(|| Context::new(side)),
        };
        context.as_ref().ok_or(TlsError(TlsFailure::Library(0)))
    }

    /// A context of its own.
    pub(crate) fn new(side: Side) -> Option<Context> {
        // SAFETY: it has no requirements.
        let method = unsafe { openssl::TLS_method() };
        // SAFETY: the method is a static table.
        let context = Context(NonNull::new(unsafe { openssl::SSL_CTX_new(method) })?);
        let pointer = context.as_ptr();
        let version = i64::from(openssl::TLS1_3_VERSION);
        let release = openssl::SSL_MODE_RELEASE_BUFFERS
            | openssl::SSL_MODE_ENABLE_PARTIAL_WRITE
            | openssl::SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER;
        // With arguments that are numbers, of the types that the commands of SSL_CTX_ctrl take.
        let controls = [
            (openssl::SSL_CTRL_SET_MIN_PROTO_VERSION, version),
            (openssl::SSL_CTRL_SET_MAX_PROTO_VERSION, version),
            (openssl::SSL_CTRL_MODE, release),
            (openssl::SSL_CTRL_SET_SESS_CACHE_MODE, openssl::SSL_SESS_CACHE_OFF),
        ];
        for (command, value) in controls {
            // SAFETY: the context was just created; these commands take no pointer.
            unsafe { openssl::SSL_CTX_ctrl(pointer, command, value as _, ptr::null_mut()) };
        }
        // SAFETY: the context was just created.
        unsafe { openssl::SSL_CTX_set_options(pointer, openssl::SSL_OP_NO_TICKET as _) };
        // SAFETY: the context was just created.
        unsafe { ffi::SSL_CTX_set_num_tickets(pointer, 0) };
        if side == Side::Client {
            // No certificate is accepted: there is no authority that could have signed it.
            // SAFETY: the context was just created.
            unsafe { openssl::SSL_CTX_set_verify(pointer, openssl::SSL_VERIFY_PEER, None) };
        }
        // SAFETY: the names are terminated.
        let suites = unsafe { openssl::SSL_CTX_set_ciphersuites(pointer, SUITES.as_ptr()) };
        match side {
            // SAFETY: the callback has the declared type, and lives forever.
            Side::Client => unsafe {
                ffi::SSL_CTX_set_psk_use_session_callback(pointer, Some(callbacks::use_session));
            },
            Side::Server => {
                // SAFETY: as above.
                unsafe { ffi::SSL_CTX_set_psk_find_session_callback(pointer, Some(callbacks::find_session)) };
                let hello: ffi::ClientHello = callbacks::client_hello;
                // SAFETY: as above; the callback has no argument.
                unsafe { ffi::SSL_CTX_set_client_hello_cb(pointer, Some(hello), ptr::null_mut()) };
            }
        }
        (suites == 1).then_some(context)
    }

    pub(crate) fn as_ptr(&self) -> *mut openssl::SSL_CTX {
        self.0.as_ptr()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: this has a reference to the context, and each session one of its own.
        unsafe { openssl::SSL_CTX_free(self.0.as_ptr()) };
    }
}
