//! TLS to etcd (rustls, sans-IO): whom this process trusts, who it is, and a connection with a time limit.
//!
//! Here and not in `host/sockets`: these are sockets of control threads, and nothing else of Ringbolt's has
//! certificates. NVMe/TCP's pre-shared keys are no part of rustls.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{AlertDescription, CertificateError, ClientConfig, ClientConnection, Error, RootCertStore};
use secret::Secret;

use super::connection::{HttpError, time_left};
use super::files::{EtcdFileError, EtcdFiles};
use crate::MapError;

/// The files, and what they had when they were read last.
pub(super) struct TlsSettings {
    files: EtcdFiles,
    known: Mutex<Option<Known>>,
}

/// Contents of the files: the CA's, of the certificate and of its key.
type FileContents = [Option<Secret>; 3];

/// With its sessions, which make the next handshake cheaper.
struct Known {
    contents: FileContents,
    config: Arc<ClientConfig>,
}

impl TlsSettings {
    /// # Errors
    /// [`MapError::Invalid`] without a CA, or with half of what makes a client certificate.
    pub(super) fn new(files: &EtcdFiles) -> Result<TlsSettings, MapError> {
        let reason = match (&files.ca, &files.certificate, &files.key) {
            (None, ..) => "https:// needs the certificate of etcd's CA: --etcd-ca-file names it",
            (_, Some(_), None) => "a client certificate needs its key: --etcd-key-file names it",
            (_, None, Some(_)) => "the key of a client certificate needs it: --etcd-cert-file names it",
            _ => return Ok(TlsSettings { files: files.clone(), known: Mutex::default() }),
        };
        Err(MapError::Invalid(reason.to_string()))
    }

    /// What a connection needs. The files are read for each one: certificates are replaced while a process
    /// runs.
    fn config(&self) -> Result<Arc<ClientConfig>, EtcdFileError> {
        let mut contents = FileContents::default();
        for (content, (named, path)) in contents.iter_mut().zip(self.files.of_tls()) {
            if let Some(path) = path {
                *content = Some(EtcdFiles::read(named, path)?);
            }
        }
        let mut known = sync::lock(&self.known);
        if let Some(known) = known.as_ref().filter(|known| known.contents == contents) {
            return Ok(known.config.clone());
        }
        let config = self.build(&contents)?;
        *known = Some(Known { contents, config: config.clone() });
        Ok(config)
    }

    fn build(&self, contents: &FileContents) -> Result<Arc<ClientConfig>, EtcdFileError> {
        let [ca, certificate, key] =
            contents.each_ref().map(|file| file.as_ref().map_or(&[][..], Secret::reveal));
        let (Some(ca_path), certificate_path, key_path) =
            (&self.files.ca, &self.files.certificate, &self.files.key)
        else {
            unreachable!("it was checked")
        };
        let mut roots = RootCertStore::empty();
        for root in certificates(ca).map_err(|reason| EtcdFileError::new(ca_path, reason))? {
            let unusable =
                |error| EtcdFileError::new(ca_path, format!("a certificate of it cannot be used: {error}"));
            roots.add(root).map_err(unusable)?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        // No ALPN: without it a server of Go speaks HTTP/1.1.
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("the provider has ciphers of both versions")
            .with_root_certificates(roots);
        let (Some(certificate_path), Some(key_path)) = (certificate_path, key_path) else {
            return Ok(Arc::new(builder.with_no_client_auth()));
        };
        let chain =
            certificates(certificate).map_err(|reason| EtcdFileError::new(certificate_path, reason))?;
        // Not with the parser's reason, which may have a line of the key.
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| {
            EtcdFileError::new(key_path, "it has no private key in PEM, without a passphrase")
        })?;
        let config = builder.with_client_auth_cert(chain, key).map_err(|error| {
            let reason = match error {
                Error::InconsistentKeys(_) => {
                    format!("it is not the key of the certificate in {}", certificate_path.display())
                }
                error => format!("it cannot be used: {error}"),
            };
            EtcdFileError::new(key_path, reason)
        })?;
        Ok(Arc::new(config))
    }
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, &'static str> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match all {
        Ok(all) if !all.is_empty() => Ok(all),
        _ => Err("it has no certificates in PEM, or a damaged one"),
    }
}

/// A TLS connection whose every step ends at a deadline. What is received and not read yet is bounded by
/// rustls: 64 KiB of a handshake, and a record of 16 KiB.
pub(super) struct TlsStream {
    socket: TcpStream,
    tls: Box<ClientConnection>,
    has_certificate: bool,
}

impl TlsStream {
    /// Makes the handshake. `host` is what the server's certificate must be for.
    pub(super) fn open(
        socket: TcpStream,
        settings: &TlsSettings,
        host: &str,
        deadline: Instant,
    ) -> Result<TlsStream, HttpError> {
        let config = settings.config()?;
        let name = ServerName::try_from(host.to_string())
            .map_err(|_| HttpError::Tls(format!("no certificate is for a name such as {host:?}")))?;
        let has_certificate = config.client_auth_cert_resolver.has_certs();
        let tls = ClientConnection::new(config, name).map_err(|error| HttpError::Tls(error.to_string()))?;
        let mut stream = TlsStream { socket, tls: Box::new(tls), has_certificate };
        while stream.tls.is_handshaking() {
            match stream.receive(deadline)? {
                Received::Data => {}
                Received::End => {
                    return Err(HttpError::Tls("it closed the connection during the handshake".to_string()));
                }
                Received::Nothing => return Err(HttpError::SlowHandshake),
            }
        }
        Ok(stream)
    }

    pub(super) fn write_all(&mut self, mut bytes: &[u8], deadline: Instant) -> Result<(), HttpError> {
        while !bytes.is_empty() {
            let taken = self.tls.writer().write(bytes)?;
            bytes = &bytes[taken..];
            self.flush(deadline)?;
        }
        Ok(())
    }

    /// As of a socket: 0 bytes are the end. `None` at the deadline.
    pub(super) fn read(&mut self, buffer: &mut [u8], deadline: Instant) -> Result<Option<usize>, HttpError> {
        loop {
            match self.tls.reader().read(buffer) {
                Ok(count) => return Ok(Some(count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // Anyone on the way can end a TCP connection: this is no end of an answer.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return Err(HttpError::Truncated);
                }
                Err(error) => return Err(error.into()),
            }
            if let Received::Nothing = self.receive(deadline)? {
                return Ok(None);
            }
        }
    }

    fn flush(&mut self, deadline: Instant) -> Result<(), HttpError> {
        while self.tls.wants_write() {
            let left = time_left(deadline).ok_or(HttpError::NotSent)?;
            self.socket.set_write_timeout(Some(left))?;
            match self.tls.write_tls(&mut self.socket) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The reason may have arrived, such as that the certificate is refused.
                Err(error) => return Err(self.received_alert(deadline).unwrap_or(HttpError::Failed(error))),
            }
        }
        Ok(())
    }

    fn received_alert(&mut self, deadline: Instant) -> Option<HttpError> {
        let left = time_left(deadline)?;
        self.socket.set_read_timeout(Some(left)).ok()?;
        self.tls.read_tls(&mut self.socket).ok()?;
        self.tls.process_new_packets().err().map(|error| self.explain(error))
    }

    /// Sends what is to be sent, and receives once.
    fn receive(&mut self, deadline: Instant) -> Result<Received, HttpError> {
        self.flush(deadline)?;
        let Some(left) = time_left(deadline) else { return Ok(Received::Nothing) };
        self.socket.set_read_timeout(Some(left))?;
        let received = match self.tls.read_tls(&mut self.socket) {
            Ok(0) => Received::End,
            Ok(_) => Received::Data,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(Received::Data),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                return Ok(Received::Nothing);
            }
            Err(error) => return Err(error.into()),
        };
        if let Err(error) = self.tls.process_new_packets() {
            // The peer gets an alert, if it takes one.
            let _ = self.tls.write_tls(&mut self.socket);
            return Err(self.explain(error));
        }
        Ok(received)
    }

    fn explain(&self, error: Error) -> HttpError {
        let reason = match error {
            Error::InvalidCertificate(error) => explain_certificate(&error),
            Error::AlertReceived(
                alert @ (AlertDescription::CertificateRequired
                | AlertDescription::BadCertificate
                | AlertDescription::UnsupportedCertificate
                | AlertDescription::CertificateRevoked
                | AlertDescription::CertificateExpired
                | AlertDescription::CertificateUnknown
                | AlertDescription::UnknownCA
                | AlertDescription::AccessDenied),
            ) => match self.has_certificate {
                true => format!("it refuses the certificate of --etcd-cert-file ({alert:?})"),
                false => format!("it requires a client certificate ({alert:?}): --etcd-cert-file names one"),
            },
            Error::InvalidMessage(_) if self.tls.is_handshaking() => {
                "it does not speak TLS: its URL may be http://".to_string()
            }
            error => error.to_string(),
        };
        HttpError::Tls(reason)
    }
}

enum Received {
    Data,
    /// The connection is closed.
    End,
    /// Until the deadline.
    Nothing,
}

fn explain_certificate(error: &CertificateError) -> String {
    match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            format!("its certificate has expired ({error})")
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            format!("its certificate is not valid yet ({error})")
        }
        CertificateError::UnknownIssuer => "its certificate is not of the CA in --etcd-ca-file".to_string(),
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            format!("its certificate is for another host ({error})")
        }
        error => format!("its certificate is refused: {error}"),
    }
}
