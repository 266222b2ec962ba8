//! A server's certificate, and the authority of its clients.

use std::ffi::{CString, c_int, c_uint};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;

use openssl_sys as openssl;
use secret::{Secret, SecretFileError};

use crate::context::{Context, Side};
use crate::ffi;

/// Most bytes of the file of a private key: RSA with 16,384 bits has 13 KB.
const KEY_FILE_BYTES_MAX: usize = 64 << 10;

/// Files of a server's certificate, all in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The certificate, and those between it and its authority.
    pub certificate: PathBuf,
    /// Its private key, without a password; for its owner alone ([`Secret::read`]).
    pub private_key: PathBuf,
    /// Certificates of the authorities of clients. With it, each client needs a certificate of one of them.
    pub client_ca: Option<PathBuf>,
}

/// A server's certificate, as it was when its files were read. Clones share it.
#[derive(Clone)]
pub struct Certificates(Arc<Context>);

/// Why a server has no certificate.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// The file of the private key is refused.
    #[error("{}: {error}", .path.display())]
    KeyFile {
        /// The file.
        path: PathBuf,
        /// Why.
        error: SecretFileError,
    },
    /// OpenSSL does not read what a file has to have.
    #[error("{}: no {what} in PEM can be read: {reason}", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Certificate, or private key.
        what: &'static str,
        /// OpenSSL's text.
        reason: String,
    },
    /// The two do not belong together.
    #[error("{}: it is not the private key of the certificate in {}", .private_key.display(), .certificate.display())]
    OtherKey {
        /// The file of the key.
        private_key: PathBuf,
        /// The file of the certificate.
        certificate: PathBuf,
    },
    /// Memory is short.
    #[error("OpenSSL has no memory")]
    Memory,
}

impl std::fmt::Debug for Certificates {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Certificates")
    }
}

impl Certificates {
    /// Reads the files.
    ///
    /// # Errors
    /// One cannot be read, has something else, or the key is another certificate's.
    pub fn read(files: &CertificateFiles) -> Result<Certificates, CertificateError> {
        let context = Context::new(Side::Server).ok_or(CertificateError::Memory)?;
        // SAFETY: it clears this thread's list of errors.
        unsafe { openssl::ERR_clear_error() };
        let chain = file_name(&files.certificate, "certificate")?;
        // SAFETY: the context is valid, and the name terminated.
        let used = unsafe { openssl::SSL_CTX_use_certificate_chain_file(context.as_ptr(), chain.as_ptr()) };
        if used != 1 {
            return Err(unreadable(&files.certificate, "certificate"));
        }
        use_private_key(&context, files)?;
        if let Some(authorities) = &files.client_ca {
            demand_certificates(&context, authorities)?;
        }
        Ok(Certificates(Arc::new(context)))
    }

    pub(crate) fn context(&self) -> &Context {
        &self.0
    }
}

fn use_private_key(context: &Context, files: &CertificateFiles) -> Result<(), CertificateError> {
    let path = &files.private_key;
    let pem = Secret::read(path, KEY_FILE_BYTES_MAX)
        .map_err(|error| CertificateError::KeyFile { path: path.clone(), error })?;
    let pem = pem.reveal();
    let length = c_int::try_from(pem.len()).map_err(|_| unreadable(path, "private key"))?;
    // SAFETY: the bytes have this length, and live longer than the buffer, which only reads them.
    let bio = unsafe { openssl::BIO_new_mem_buf(pem.as_ptr().cast(), length) };
    if bio.is_null() {
        return Err(CertificateError::Memory);
    }
    // SAFETY: the buffer is valid. The empty password, which the last argument is, keeps OpenSSL from asking
    // for one at the terminal.
    let key = unsafe {
        openssl::PEM_read_bio_PrivateKey(bio, ptr::null_mut(), None, c"".as_ptr().cast_mut().cast())
    };
    // SAFETY: there is no other reference to the buffer.
    unsafe { openssl::BIO_free_all(bio) };
    if key.is_null() {
        return Err(unreadable(path, "private key"));
    }
    // SAFETY: both are valid. It fails if the key is not the certificate's.
    let used = unsafe { openssl::SSL_CTX_use_PrivateKey(context.as_ptr(), key) };
    // SAFETY: the context has a reference of its own if it uses the key.
    unsafe { openssl::EVP_PKEY_free(key) };
    // SAFETY: the context is valid.
    let is_pair = used == 1 && unsafe { openssl::SSL_CTX_check_private_key(context.as_ptr()) } == 1;
    // SAFETY: it clears this thread's list of errors.
    unsafe { openssl::ERR_clear_error() };
    match is_pair {
        true => Ok(()),
        false => Err(CertificateError::OtherKey {
            private_key: path.clone(),
            certificate: files.certificate.clone(),
        }),
    }
}

/// Has each client prove that it has a certificate of these authorities.
fn demand_certificates(context: &Context, authorities: &Path) -> Result<(), CertificateError> {
    const WHAT: &str = "certificate";
    let name = file_name(authorities, WHAT)?;
    // SAFETY: the context is valid, and the name terminated.
    let loaded =
        unsafe { openssl::SSL_CTX_load_verify_locations(context.as_ptr(), name.as_ptr(), ptr::null()) };
    if loaded != 1 {
        return Err(unreadable(authorities, WHAT));
    }
    // SAFETY: the name is terminated.
    let names = unsafe { openssl::SSL_load_client_CA_file(name.as_ptr()) };
    if names.is_null() {
        return Err(unreadable(authorities, WHAT));
    }
    // SAFETY: the context owns the list afterwards.
    unsafe { openssl::SSL_CTX_set_client_CA_list(context.as_ptr(), names) };
    let mode = openssl::SSL_VERIFY_PEER | openssl::SSL_VERIFY_FAIL_IF_NO_PEER_CERT;
    // SAFETY: the context is valid.
    unsafe { openssl::SSL_CTX_set_verify(context.as_ptr(), mode, None) };
    // A pre-shared key is a session to OpenSSL, and one that verifies clients takes sessions of a named
    // context only.
    const NAME: &[u8] = b"ringbolt";
    // SAFETY: the context is valid, and the name has this length.
    let named = unsafe {
        openssl::SSL_CTX_set_session_id_context(context.as_ptr(), NAME.as_ptr(), NAME.len() as c_uint)
    };
    if named == 1 { Ok(()) } else { Err(CertificateError::Memory) }
}

/// The name for OpenSSL, which opens what it is given: a FIFO would keep it waiting.
fn file_name(path: &Path, what: &'static str) -> Result<CString, CertificateError> {
    let unreadable = |reason: String| CertificateError::Unreadable { path: path.to_path_buf(), what, reason };
    let metadata = std::fs::metadata(path).map_err(|error| unreadable(error.to_string()))?;
    if !metadata.is_file() {
        return Err(unreadable("it is not a file".into()));
    }
    CString::new(path.as_os_str().as_bytes()).map_err(|_| unreadable("its path has a NUL".into()))
}

/// With the text of the newest of this thread's errors, which it clears.
fn unreadable(path: &Path, what: &'static str) -> CertificateError {
    let mut reason = String::from("it has none");
    loop {
        // SAFETY: it takes the first from this thread's list of errors.
        let code = unsafe { openssl::ERR_get_error() };
        if code == 0 {
            return CertificateError::Unreadable { path: path.to_path_buf(), what, reason };
        }
        reason = ffi::reason_text(code).unwrap_or_else(|| format!("OpenSSL's error {code:#x}"));
    }
}
