//! Functions of OpenSSL 3 that `openssl-sys` does not declare, and numbers of its headers.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_void};

use openssl_sys::{EVP_MD, SSL, SSL_CIPHER, SSL_CTX, SSL_SESSION};

/// SSL_psk_find_session_cb_func.
pub(crate) type FindSession =
    unsafe extern "C" fn(*mut SSL, *const c_uchar, usize, *mut *mut SSL_SESSION) -> c_int;
/// SSL_psk_use_session_cb_func.
pub(crate) type UseSession = unsafe extern "C" fn(
    *mut SSL,
    *const EVP_MD,
    *mut *const c_uchar,
    *mut usize,
    *mut *mut SSL_SESSION,
) -> c_int;
/// SSL_client_hello_cb_fn.
pub(crate) type ClientHello = unsafe extern "C" fn(*mut SSL, *mut c_int, *mut c_void) -> c_int;

unsafe extern "C" {
    pub(crate) fn SSL_CTX_set_psk_find_session_callback(context: *mut SSL_CTX, callback: Option<FindSession>);
    pub(crate) fn SSL_CTX_set_psk_use_session_callback(context: *mut SSL_CTX, callback: Option<UseSession>);
    pub(crate) fn SSL_CTX_set_client_hello_cb(
        context: *mut SSL_CTX,
        callback: Option<ClientHello>,
        argument: *mut c_void,
    );
    pub(crate) fn SSL_CTX_set_num_tickets(context: *mut SSL_CTX, count: usize) -> c_int;
    pub(crate) fn SSL_client_hello_get0_ext(
        ssl: *mut SSL,
        kind: c_uint,
        out: *mut *const c_uchar,
        length: *mut usize,
    ) -> c_int;
    pub(crate) fn SSL_set_ciphersuites(ssl: *mut SSL, names: *const c_char) -> c_int;
    pub(crate) fn SSL_CIPHER_find(ssl: *mut SSL, number: *const c_uchar) -> *const SSL_CIPHER;
    pub(crate) fn SSL_SESSION_new() -> *mut SSL_SESSION;
    pub(crate) fn SSL_SESSION_free(session: *mut SSL_SESSION);
    pub(crate) fn SSL_SESSION_set1_master_key(
        session: *mut SSL_SESSION,
        key: *const c_uchar,
        length: usize,
    ) -> c_int;
    pub(crate) fn SSL_SESSION_set_cipher(session: *mut SSL_SESSION, cipher: *const SSL_CIPHER) -> c_int;
    pub(crate) fn SSL_SESSION_set_protocol_version(session: *mut SSL_SESSION, version: c_int) -> c_int;
    pub(crate) fn SSL_set0_rbio(ssl: *mut SSL, bio: *mut openssl_sys::BIO);
    pub(crate) fn SSL_set0_wbio(ssl: *mut SSL, bio: *mut openssl_sys::BIO);
    #[cfg(test)]
    pub(crate) fn SSL_key_update(ssl: *mut SSL, kind: c_int) -> c_int;
    pub(crate) fn BIO_ctrl_pending(bio: *mut openssl_sys::BIO) -> usize;
}

/// TLSEXT_TYPE_psk.
pub(crate) const EXTENSION_PSK: c_uint = 41;
/// SSL_CLIENT_HELLO_SUCCESS and SSL_CLIENT_HELLO_ERROR.
pub(crate) const HELLO_ACCEPTED: c_int = 1;
pub(crate) const HELLO_REJECTED: c_int = 0;
/// SSL_AD_HANDSHAKE_FAILURE and SSL_AD_UNKNOWN_PSK_IDENTITY.
pub(crate) const ALERT_HANDSHAKE_FAILURE: c_int = 40;
pub(crate) const ALERT_UNKNOWN_IDENTITY: c_int = 115;

/// SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE.
pub(crate) const REASON_NO_CERTIFICATE: u32 = 199;
/// SSL_R_CERTIFICATE_VERIFY_FAILED.
pub(crate) const REASON_BAD_CERTIFICATE: u32 = 134;
/// SSL_R_BINDER_DOES_NOT_VERIFY.
pub(crate) const REASON_BINDER: u32 = 253;
/// SSL_R_DECRYPTION_FAILED_OR_BAD_RECORD_MAC.
pub(crate) const REASON_BAD_MAC: u32 = 281;
/// SSL_R_NO_SHARED_CIPHER, SSL_R_UNSUPPORTED_PROTOCOL, SSL_R_NO_SUITABLE_KEY_SHARE,
/// SSL_R_NO_SUITABLE_SIGNATURE_ALGORITHM.
pub(crate) const REASONS_NOTHING_IN_COMMON: [u32; 4] = [193, 258, 101, 118];
/// SSL_AD_REASON_OFFSET: a reason of this and more is an alert of the peer.
pub(crate) const REASON_ALERTS: u32 = 1000;
/// ERR_LIB_SSL.
pub(crate) const LIBRARY_SSL: u32 = 20;
/// ERR_R_MALLOC_FAILURE.
pub(crate) const REASON_MEMORY: u32 = 256 | 1 << 18;

/// OpenSSL's text for the reason of an error, if it has one.
pub(crate) fn reason_text(code: std::ffi::c_ulong) -> Option<String> {
    // SAFETY: it looks the number up in OpenSSL's tables.
    let text = unsafe { openssl_sys::ERR_reason_error_string(code) };
    if text.is_null() {
        return None;
    }
    // SAFETY: it is a terminated text that lives as long as the process.
    Some(unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned())
}
