//! What OpenSSL asks a session during its handshake: which key.

use std::ffi::{c_int, c_uchar, c_void};
use std::ptr;
use std::sync::Arc;

use openssl_sys as openssl;
use openssl_sys::{EVP_MD, SSL, SSL_SESSION};

use crate::error::TlsFailure;
use crate::ffi;
use crate::psk::{IDENTITY_MAX, Psk, PskSource};

/// What the callbacks of a session use. The session owns it, and does not touch it while it is in OpenSSL.
pub(crate) struct KeyChoice {
    /// A server's keys.
    pub(crate) source: Option<Arc<dyn PskSource>>,
    /// A server proves itself with its certificate where the client offers none of its keys.
    pub(crate) has_certificate: bool,
    /// The client's key, or the one that the server has found.
    pub(crate) psk: Option<Psk>,
    /// The first identity that the client offered, as far as it is text.
    pub(crate) offered: Option<String>,
    /// Why the server rejected ClientHello.
    pub(crate) failure: Option<TlsFailure>,
}

/// Identities of a ClientHello that are looked up: hosts offer one key, perhaps in both versions of
/// identities.
const IDENTITIES_MAX: usize = 8;

impl KeyChoice {
    /// Selects the first of the offered identities that is known. Of a list as in RFC 8446, section 4.2.11:
    /// each with its length before and an age of four bytes behind it.
    pub(crate) fn select(&mut self, extension: &[u8]) -> Result<(), TlsFailure> {
        for identity in identities(extension).take(IDENTITIES_MAX) {
            let Ok(text) = std::str::from_utf8(identity) else { continue };
            if self.offered.is_none() {
                self.offered = Some(text.chars().take(IDENTITY_MAX).filter(|c| !c.is_control()).collect());
            }
            if let Some(psk) = self.source.as_ref().and_then(|source| source.find(text)) {
                self.psk = Some(psk);
                return Ok(());
            }
        }
        Err(TlsFailure::UnknownIdentity)
    }
}

/// The identities of the extension.
fn identities(extension: &[u8]) -> impl Iterator<Item = &[u8]> {
    let take = |from: &mut &'_ [u8], count: usize| -> Option<usize> {
        let (_, rest) = from.split_at_checked(count)?;
        *from = rest;
        Some(count)
    };
    let length_of =
        |from: &[u8]| from.first_chunk::<2>().map(|bytes| usize::from(u16::from_be_bytes(*bytes)));
    let mut rest = length_of(extension).and_then(|length| extension.get(2..2 + length)).unwrap_or_default();
    std::iter::from_fn(move || {
        let length = length_of(rest)?;
        let identity = rest.get(2..2 + length)?;
        take(&mut rest, 2 + length + 4)?;
        (length <= IDENTITY_MAX).then_some(identity)
    })
}

/// The choice of a session.
///
/// # Safety
/// The session is one of [`TlsSession`](crate::TlsSession), and in one of OpenSSL's functions. The reference
/// must not outlive the callback.
unsafe fn choice_of<'a>(ssl: *mut SSL) -> Option<&'a mut KeyChoice> {
    // SAFETY: the session is valid during its callback.
    let choice = unsafe { openssl::SSL_get_ex_data(ssl, 0) }.cast::<KeyChoice>();
    // SAFETY: index 0 is set once, when the session is created, to a `KeyChoice` that is freed after the
    // session, and to which there is no other reference while OpenSSL runs.
    unsafe { choice.as_mut() }
}

/// SSL_client_hello_cb_fn: finds the key, and limits the session to its suite.
pub(crate) unsafe extern "C" fn client_hello(ssl: *mut SSL, alert: *mut c_int, _: *mut c_void) -> c_int {
    // SAFETY: OpenSSL calls it with the session that it processes.
    let Some(choice) = (unsafe { choice_of(ssl) }) else { return ffi::HELLO_REJECTED };
    let (mut bytes, mut length) = (ptr::null(), 0);
    // SAFETY: within this callback, with places to write to.
    let found = unsafe { ffi::SSL_client_hello_get0_ext(ssl, ffi::EXTENSION_PSK, &mut bytes, &mut length) };
    let selected = match found == 1 && !bytes.is_null() {
        // SAFETY: OpenSSL has set both, and the bytes stay until the callback returns.
        true => choice.select(unsafe { std::slice::from_raw_parts(bytes, length) }),
        false => Err(TlsFailure::NoPsk),
    };
    if selected.is_err() && choice.has_certificate {
        return ffi::HELLO_ACCEPTED;
    }
    if let (Ok(()), Some(psk)) = (selected, &choice.psk) {
        // SAFETY: the session is valid, and the name terminated.
        let set = unsafe { ffi::SSL_set_ciphersuites(ssl, psk.hash().suite().as_ptr()) };
        return if set == 1 { ffi::HELLO_ACCEPTED } else { ffi::HELLO_REJECTED };
    }
    choice.failure = selected.err();
    // SAFETY: OpenSSL passes a place for the alert.
    unsafe {
        *alert = match choice.failure {
            Some(TlsFailure::UnknownIdentity) => ffi::ALERT_UNKNOWN_IDENTITY,
            _ => ffi::ALERT_HANDSHAKE_FAILURE,
        };
    }
    ffi::HELLO_REJECTED
}

/// SSL_psk_find_session_cb_func: the key of an identity, if it is the selected one.
pub(crate) unsafe extern "C" fn find_session(
    ssl: *mut SSL,
    identity: *const c_uchar,
    length: usize,
    out: *mut *mut SSL_SESSION,
) -> c_int {
    // SAFETY: OpenSSL passes a place for the result.
    unsafe { *out = ptr::null_mut() };
    // SAFETY: OpenSSL calls it with the session that it processes.
    let Some(choice) = (unsafe { choice_of(ssl) }) else { return 1 };
    // SAFETY: OpenSSL passes the identity with its length.
    let identity = unsafe { std::slice::from_raw_parts(identity, length) };
    if let Some(psk) = &choice.psk
        && psk.identity().as_bytes() == identity
    {
        // SAFETY: OpenSSL passes a place for the result, and owns the session afterwards.
        unsafe { *out = session_of(ssl, psk) };
    }
    1
}

/// SSL_psk_use_session_cb_func: the key that the client offers.
pub(crate) unsafe extern "C" fn use_session(
    ssl: *mut SSL,
    _: *const EVP_MD,
    identity: *mut *const c_uchar,
    length: *mut usize,
    out: *mut *mut SSL_SESSION,
) -> c_int {
    // SAFETY: OpenSSL calls it with the session that it processes.
    let Some(psk) = (unsafe { choice_of(ssl) }).and_then(|choice| choice.psk.as_ref()) else { return 0 };
    let session = session_of(ssl, psk);
    // SAFETY: OpenSSL passes a place for the result. It copies the identity, which the choice keeps.
    unsafe { *identity = psk.identity().as_ptr() };
    // SAFETY: as above.
    unsafe { *length = psk.identity().len() };
    // SAFETY: as above; it owns the session afterwards.
    unsafe { *out = session };
    c_int::from(!session.is_null())
}

/// A key as OpenSSL wants it: a session that was never established. Null if memory is short.
fn session_of(ssl: *mut SSL, psk: &Psk) -> *mut SSL_SESSION {
    // SAFETY: it has no requirements.
    let session = unsafe { ffi::SSL_SESSION_new() };
    if session.is_null() {
        return session;
    }
    let suite = psk.hash().suite_bytes();
    // SAFETY: the number has two bytes.
    let cipher = unsafe { ffi::SSL_CIPHER_find(ssl, suite.as_ptr()) };
    let key = psk.key();
    // SAFETY: the session was just created; the key is copied.
    let keyed = unsafe { ffi::SSL_SESSION_set1_master_key(session, key.as_ptr(), key.len()) };
    // SAFETY: the cipher is one of OpenSSL's static table, or null, which is an error.
    let suited = !cipher.is_null() && unsafe { ffi::SSL_SESSION_set_cipher(session, cipher) } == 1;
    // SAFETY: the session was just created.
    let versioned = unsafe { ffi::SSL_SESSION_set_protocol_version(session, openssl::TLS1_3_VERSION) };
    if keyed == 1 && suited && versioned == 1 {
        return session;
    }
    // SAFETY: there is no other reference to the session.
    unsafe { ffi::SSL_SESSION_free(session) };
    ptr::null_mut()
}

#[cfg(test)]
mod tests {
    use super::identities;

    #[test]
    fn identities_are_read_as_far_as_they_are_complete() {
        let list = |extension: &'static [u8]| identities(extension).collect::<Vec<_>>();
        assert_eq!(list(b"\0\x0e\0\x01a\0\0\0\0\0\x01b\0\0\0\0"), [b"a", b"b"]);
        assert_eq!(list(b"\0\x0e\0\x01a\0\0\0\0\0\x01b\0\0\0"), Vec::<&[u8]>::new(), "the list is cut");
        assert_eq!(list(b"\0\x0b\0\x01a\0\0\0\0\0\x09b\0"), [b"a"], "an identity is longer than the list");
        for bytes in [&b""[..], b"\0", b"\0\0", b"\0\x01\0", b"\xff\xff\0\x01a"] {
            assert_eq!(identities(bytes).count(), 0, "{bytes:?}");
        }
    }
}
