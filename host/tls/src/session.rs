//! A session: one connection's state in OpenSSL, with a memory buffer for records in each direction.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr::NonNull;

use openssl_sys as openssl;

use crate::callbacks::KeyChoice;
use crate::context::{Context, Side};
use crate::error::{TlsError, TlsFailure};
use crate::ffi;
use crate::psk::Psk;
use crate::server::ServerCredentials;

/// Most bytes of records of a handshake, in each direction: several times what any client of today sends.
pub(crate) const HANDSHAKE_BYTES_MAX: usize = 32 << 10;
/// The first byte of a record of the handshake (RFC 8446, section 5.1).
const RECORD_HANDSHAKE: u8 = 22;

/// How far a handshake is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeProgress {
    /// It needs records of the peer; there may be some to send.
    Pending,
    /// Both ends have proved that they have the key, or the server that it has its certificate and the client
    /// what the server asks for. There may be records to send.
    Done,
}

/// The result of reading plaintext.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlainRead {
    /// So many bytes, at least one.
    Bytes(usize),
    /// More records are needed.
    Starved,
    /// The peer closed its end (close_notify).
    Closed,
}

/// One end of a TLS connection, without its socket.
///
/// Order: [`handshake`](Self::handshake) until it is done, with [`put_records`](Self::put_records) and
/// [`take_records`](Self::take_records) between; then [`read`](Self::read) and [`write`](Self::write) with
/// the same between. After an error only [`take_records`](Self::take_records) is useful: for the alert that
/// tells the peer. Records that were put and not consumed are bounded by what the caller puts.
pub struct TlsSession {
    ssl: NonNull<openssl::SSL>,
    /// What the callbacks use: not touched while OpenSSL runs.
    choice: NonNull<KeyChoice>,
    side: Side,
    /// Bytes of records of the peer until the handshake is done.
    handshake_bytes: usize,
    established: bool,
}

// SAFETY: nothing in it belongs to a thread, and `&self` has no method that changes it.
unsafe impl Send for TlsSession {}

impl fmt::Debug for TlsSession {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("TlsSession").field("established", &self.established).finish_non_exhaustive()
    }
}

impl TlsSession {
    /// A client that offers this key.
    ///
    /// # Errors
    /// Memory is short.
    pub fn client(psk: Psk) -> Result<TlsSession, TlsError> {
        let choice =
            KeyChoice { source: None, has_certificate: false, psk: Some(psk), offered: None, failure: None };
        TlsSession::new(Context::of(Side::Client)?, Side::Client, choice)
    }

    /// A server for clients with these keys, or that trust its certificate.
    ///
    /// # Errors
    /// Memory is short.
    pub fn server(credentials: &ServerCredentials) -> Result<TlsSession, TlsError> {
        let ServerCredentials { psks, certificates } = credentials;
        let context = match certificates {
            Some(certificates) => certificates.context(),
            None => Context::of(Side::Server)?,
        };
        let has_certificate = certificates.is_some();
        let choice =
            KeyChoice { source: psks.clone(), has_certificate, psk: None, offered: None, failure: None };
        TlsSession::new(context, Side::Server, choice)
    }

    fn new(context: &Context, side: Side, choice: KeyChoice) -> Result<TlsSession, TlsError> {
        const SHORT: TlsError = TlsError(TlsFailure::Library(ffi::REASON_MEMORY));
        // SAFETY: the context is valid; the session has a reference of its own to it.
        let ssl = NonNull::new(unsafe { openssl::SSL_new(context.as_ptr()) }).ok_or(SHORT)?;
        let suite = choice.psk.as_ref().map(|psk| psk.hash().suite());
        let choice = NonNull::from(Box::leak(Box::new(choice)));
        // From here on, dropping it frees what there is.
        let session = TlsSession { ssl, choice, side, handshake_bytes: 0, established: false };
        // SAFETY: the session was just created; the pointer is valid until after it is freed.
        let noted = unsafe { openssl::SSL_set_ex_data(ssl.as_ptr(), 0, choice.as_ptr().cast::<c_void>()) };
        for is_input in [true, false] {
            // SAFETY: it returns a static table of functions.
            let method = unsafe { openssl::BIO_s_mem() };
            // SAFETY: the table was just returned.
            let bio = unsafe { openssl::BIO_new(method) };
            if bio.is_null() {
                return Err(SHORT);
            }
            match is_input {
                // SAFETY: the session owns the new buffer afterwards.
                true => unsafe { ffi::SSL_set0_rbio(ssl.as_ptr(), bio) },
                // SAFETY: as above.
                false => unsafe { ffi::SSL_set0_wbio(ssl.as_ptr(), bio) },
            }
        }
        if let Some(suite) = suite {
            // SAFETY: the session is valid, and the name terminated.
            unsafe { ffi::SSL_set_ciphersuites(ssl.as_ptr(), suite.as_ptr()) };
        }
        match side {
            // SAFETY: the session was just created.
            Side::Client => unsafe { openssl::SSL_set_connect_state(ssl.as_ptr()) },
            // SAFETY: as above.
            Side::Server => unsafe { openssl::SSL_set_accept_state(ssl.as_ptr()) },
        }
        if noted == 1 { Ok(session) } else { Err(SHORT) }
    }

    /// Whether the handshake is done.
    pub fn is_established(&self) -> bool {
        self.established
    }

    /// The key of both ends: a client's from the beginning, a server's once a client has offered it. It is
    /// proved when the handshake is done; `None` then where the server's certificate was used instead.
    pub fn psk(&self) -> Option<&Psk> {
        // SAFETY: OpenSSL does not run: it does in methods with `&mut self` only.
        unsafe { self.choice.as_ref() }.psk.as_ref()
    }

    /// The first identity that the client has offered, without control characters; `None` before, and if it
    /// is not text.
    pub fn offered_identity(&self) -> Option<&str> {
        // SAFETY: as in `psk`.
        unsafe { self.choice.as_ref() }.offered.as_deref()
    }

    /// Takes records of the peer.
    ///
    /// # Errors
    /// The handshake is too long, does not begin as one of TLS, or memory is short.
    pub fn put_records(&mut self, records: &[u8]) -> Result<(), TlsError> {
        if !self.established {
            let is_first = self.handshake_bytes == 0;
            if is_first && records.first().is_some_and(|first| *first != RECORD_HANDSHAKE && *first != 21) {
                return Err(TlsError(TlsFailure::NotTls));
            }
            self.handshake_bytes += records.len();
            if self.handshake_bytes > HANDSHAKE_BYTES_MAX {
                return Err(TlsError(TlsFailure::TooLong));
            }
        }
        // SAFETY: the session is valid, and has the buffer.
        let bio = unsafe { openssl::SSL_get_rbio(self.ssl.as_ptr()) };
        for part in records.chunks(1 << 20) {
            // SAFETY: the part is readable, and its length fits.
            let written = unsafe { openssl::BIO_write(bio, part.as_ptr().cast(), part.len() as c_int) };
            if written != part.len() as c_int {
                return Err(TlsError(TlsFailure::Library(ffi::REASON_MEMORY)));
            }
        }
        Ok(())
    }

    /// Bytes of records to send.
    pub fn records_len(&self) -> usize {
        // SAFETY: the session is valid, and has the buffer.
        let bio = unsafe { openssl::SSL_get_wbio(self.ssl.as_ptr()) };
        // SAFETY: as above.
        unsafe { ffi::BIO_ctrl_pending(bio) }
    }

    /// Moves records to send into a buffer; returns the number of bytes, 0 if there are none.
    pub fn take_records(&mut self, into: &mut [u8]) -> usize {
        // SAFETY: the session is valid, and has the buffer.
        let bio = unsafe { openssl::SSL_get_wbio(self.ssl.as_ptr()) };
        let length = into.len().min(1 << 20);
        // SAFETY: the buffer has this length.
        let read = unsafe { openssl::BIO_read(bio, into.as_mut_ptr().cast(), length as c_int) };
        usize::try_from(read).unwrap_or(0)
    }

    /// Continues the handshake.
    ///
    /// # Errors
    /// The step that failed.
    pub fn handshake(&mut self) -> Result<HandshakeProgress, TlsError> {
        if self.established {
            return Ok(HandshakeProgress::Done);
        }
        // SAFETY: it clears this thread's list of errors.
        unsafe { openssl::ERR_clear_error() };
        // SAFETY: the session is valid; its callbacks use the choice, to which there is no reference.
        let result = unsafe { openssl::SSL_do_handshake(self.ssl.as_ptr()) };
        if result != 1 {
            return self.check(result).map(|_| HandshakeProgress::Pending);
        }
        // SAFETY: the session is valid.
        if unsafe { openssl::SSL_session_reused(self.ssl.as_ptr()) } != 1 {
            // SAFETY: OpenSSL does not run.
            let choice = unsafe { self.choice.as_mut() };
            if !choice.has_certificate {
                return Err(TlsError(TlsFailure::KeyNotUsed));
            }
            choice.psk = None;
        }
        self.established = true;
        Ok(HandshakeProgress::Done)
    }

    /// Reads plaintext, after the handshake.
    ///
    /// # Errors
    /// A record is not authentic, or the peer ended the session with an alert.
    pub fn read(&mut self, into: &mut [u8]) -> Result<PlainRead, TlsError> {
        if into.is_empty() {
            return Ok(PlainRead::Starved);
        }
        let length = into.len().min(1 << 20);
        // SAFETY: it clears this thread's list of errors.
        unsafe { openssl::ERR_clear_error() };
        // SAFETY: the session is valid, and the buffer has this length.
        let read = unsafe { openssl::SSL_read(self.ssl.as_ptr(), into.as_mut_ptr().cast(), length as c_int) };
        match usize::try_from(read) {
            Ok(count) if count > 0 => Ok(PlainRead::Bytes(count)),
            _ => self.check(read),
        }
    }

    /// Encrypts plaintext, after the handshake, as records of at most 16 KiB each. It takes all.
    ///
    /// # Errors
    /// Memory is short, or the session has failed.
    pub fn write(&mut self, plain: &[u8]) -> Result<(), TlsError> {
        let mut rest = plain;
        while !rest.is_empty() {
            let length = rest.len().min(1 << 20);
            // SAFETY: it clears this thread's list of errors.
            unsafe { openssl::ERR_clear_error() };
            // SAFETY: the session is valid, and the bytes have this length.
            let written =
                unsafe { openssl::SSL_write(self.ssl.as_ptr(), rest.as_ptr().cast(), length as c_int) };
            match usize::try_from(written) {
                Ok(count) if count > 0 => rest = &rest[count..],
                // A buffer in memory never blocks.
                _ => return Err(self.check(written).err().unwrap_or(TlsError(TlsFailure::Library(0)))),
            }
        }
        Ok(())
    }

    /// Sends a KeyUpdate, which asks for none.
    #[cfg(test)]
    pub(crate) fn update_key(&mut self) {
        // SAFETY: the session is valid; 0 is SSL_KEY_UPDATE_NOT_REQUESTED.
        let updated = unsafe { ffi::SSL_key_update(self.ssl.as_ptr(), 0) };
        // SAFETY: as above; it writes the message.
        let written = unsafe { openssl::SSL_do_handshake(self.ssl.as_ptr()) };
        assert_eq!((updated, written), (1, 1));
    }

    /// What a call without success means.
    fn check(&mut self, result: c_int) -> Result<PlainRead, TlsError> {
        // SAFETY: the session is valid, and the call was this thread's last of OpenSSL.
        let error = unsafe { openssl::SSL_get_error(self.ssl.as_ptr(), result) };
        match error {
            openssl::SSL_ERROR_WANT_READ | openssl::SSL_ERROR_WANT_WRITE => return Ok(PlainRead::Starved),
            openssl::SSL_ERROR_ZERO_RETURN => return Ok(PlainRead::Closed),
            _ => {}
        }
        // SAFETY: OpenSSL does not run.
        if let Some(failure) = unsafe { self.choice.as_ref() }.failure {
            return Err(TlsError(failure));
        }
        // SAFETY: it takes the first, the cause, from this thread's list of errors.
        let code = unsafe { openssl::ERR_get_error() } as u32;
        // ERR_GET_LIB and ERR_GET_REASON.
        let (library, reason) = (code >> 23 & 0xff, code & 0x7f_ffff);
        let in_handshake = self.side == Side::Server && !self.established;
        Err(TlsError(match reason {
            _ if library != ffi::LIBRARY_SSL => TlsFailure::Library(reason),
            ffi::REASON_MEMORY => TlsFailure::Library(reason),
            ffi::REASON_BINDER => TlsFailure::WrongKey,
            ffi::REASON_NO_CERTIFICATE => TlsFailure::NoCertificate,
            ffi::REASON_BAD_CERTIFICATE => TlsFailure::BadCertificate,
            ffi::REASON_BAD_MAC if !self.established => TlsFailure::WrongKey,
            reason if in_handshake && ffi::REASONS_NOTHING_IN_COMMON.contains(&reason) => {
                TlsFailure::NothingInCommon
            }
            reason if (ffi::REASON_ALERTS..ffi::REASON_ALERTS + 256).contains(&reason) => {
                TlsFailure::PeerAlert((reason - ffi::REASON_ALERTS) as u8)
            }
            reason => TlsFailure::Protocol(reason),
        }))
    }
}

impl Drop for TlsSession {
    fn drop(&mut self) {
        // SAFETY: this owns the session, which frees its buffers.
        unsafe { openssl::SSL_free(self.ssl.as_ptr()) };
        // SAFETY: it came from a `Box`, and the session that had the other pointer is freed.
        drop(unsafe { Box::from_raw(self.choice.as_ptr()) });
    }
}
