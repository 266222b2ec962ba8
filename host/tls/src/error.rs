//! Why sessions fail.

use std::fmt;
use std::io;

/// The step of a handshake that failed, or what ended an established session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsFailure {
    /// The peer's first byte begins no TLS handshake: it does not use TLS.
    NotTls,
    /// The client offers no pre-shared key.
    NoPsk,
    /// The client offers no key with an identity that the server has.
    UnknownIdentity,
    /// The client has no certificate, although the server asks for one.
    NoCertificate,
    /// The client's certificate is not of the server's authority, or not valid now.
    BadCertificate,
    /// The proof of the key (the binder) is wrong: the two ends have different keys for this identity.
    WrongKey,
    /// The ends have no version, suite, group or exchange in common.
    NothingInCommon,
    /// The server does not use the key that the client offered.
    KeyNotUsed,
    /// The peer sent an alert (RFC 8446, section 6) with this number.
    PeerAlert(u8),
    /// The peer's messages of the handshake are longer than any that are needed.
    TooLong,
    /// The peer requests new keys, and does not read what that makes.
    UnreadAnswers,
    /// The peer sends records without data, such as KeyUpdate, without end.
    NoData,
    /// The peer violated the protocol, or a record is not authentic; OpenSSL's number of the reason.
    Protocol(u32),
    /// Memory is short, or OpenSSL lacks what it needs.
    Library(u32),
}

impl TlsFailure {
    /// The kind of I/O error that it is for users that know no other.
    pub fn kind(self) -> io::ErrorKind {
        match self {
            TlsFailure::NoPsk
            | TlsFailure::UnknownIdentity
            | TlsFailure::NoCertificate
            | TlsFailure::BadCertificate
            | TlsFailure::WrongKey
            | TlsFailure::KeyNotUsed => io::ErrorKind::PermissionDenied,
            TlsFailure::PeerAlert(_) => io::ErrorKind::ConnectionAborted,
            TlsFailure::Library(_) => io::ErrorKind::OutOfMemory,
            _ => io::ErrorKind::InvalidData,
        }
    }
}

impl fmt::Display for TlsFailure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TlsFailure::NotTls => formatter.write_str("the peer does not use TLS"),
            TlsFailure::NoPsk => formatter.write_str("ClientHello offers no pre-shared key"),
            TlsFailure::UnknownIdentity => {
                formatter.write_str("ClientHello offers a key with an identity that is not known here")
            }
            TlsFailure::NoCertificate => formatter.write_str("the client has no certificate"),
            TlsFailure::BadCertificate => formatter.write_str(
                "the client's certificate is not of the authority that is configured here, or has expired",
            ),
            TlsFailure::WrongKey => {
                formatter.write_str("ClientHello's binder does not match: the two ends have different keys")
            }
            TlsFailure::NothingInCommon => {
                formatter.write_str("ClientHello has no TLS version, suite or group that is accepted here")
            }
            TlsFailure::KeyNotUsed => formatter.write_str("ServerHello does not select the offered key"),
            TlsFailure::PeerAlert(alert) => match alert_name(*alert) {
                Some(name) => write!(formatter, "the peer sent the alert {name}"),
                None => write!(formatter, "the peer sent alert {alert}"),
            },
            TlsFailure::TooLong => formatter.write_str("the handshake is too long"),
            TlsFailure::UnreadAnswers => formatter.write_str("the peer does not read answers to KeyUpdate"),
            TlsFailure::NoData => formatter.write_str("the peer sends records without data"),
            TlsFailure::Protocol(reason) => {
                write!(formatter, "a TLS record or message is not valid (OpenSSL's reason {reason})")
            }
            TlsFailure::Library(reason) => write!(formatter, "OpenSSL failed (reason {reason})"),
        }
    }
}

/// The names of alerts that keys and their set-up cause (RFC 8446, section 6.2).
fn alert_name(alert: u8) -> Option<&'static str> {
    Some(match alert {
        20 => "bad_record_mac: its key differs",
        40 => "handshake_failure: it accepts nothing that was offered",
        42 => "bad_certificate",
        43 => "unsupported_certificate",
        45 => "certificate_expired",
        46 => "certificate_unknown",
        47 => "illegal_parameter: its key differs, or it accepts nothing that was offered",
        48 => "unknown_ca: it does not know who signed the certificate",
        51 => "decrypt_error: its key differs",
        70 => "protocol_version",
        80 => "internal_error",
        109 => "missing_extension",
        115 => "unknown_psk_identity: it has no key with this identity",
        116 => "certificate_required",
        _ => return None,
    })
}

/// A failed session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TlsError(pub TlsFailure);

impl fmt::Display for TlsError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

impl std::error::Error for TlsError {}
