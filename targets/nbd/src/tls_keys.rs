//! The keys and the certificate for TLS, in files.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use secret::Secret;
use tls::{CertificateFiles, Certificates, Psk, PskHash, ServerCredentials};

use crate::failure::TlsKeysError;

/// Most bytes of a file of keys: some thousand clients.
const PSK_FILE_BYTES_MAX: usize = 1 << 20;

/// With what the target proves itself to clients with TLS, and they to it. One of the two at least.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// Lines `NAME:HEX`, as GnuTLS's `psktool` writes them and NBD's clients read them: the keys of clients.
    pub psk_file: Option<PathBuf>,
    /// The target's certificate.
    pub certificate: Option<CertificateFiles>,
}

impl TlsFiles {
    /// Reads the files.
    pub(crate) fn read(&self) -> Result<ServerCredentials, TlsKeysError> {
        let mut credentials = ServerCredentials::default();
        if let Some(path) = &self.psk_file {
            let file = Secret::read(path, PSK_FILE_BYTES_MAX)
                .map_err(|error| TlsKeysError::File { path: path.clone(), error })?;
            credentials.psks = Some(Arc::new(parse_keys(path, &file)?));
        }
        if let Some(files) = &self.certificate {
            credentials.certificates = Some(Certificates::read(files)?);
        }
        Ok(credentials)
    }
}

fn parse_keys(path: &Path, file: &Secret) -> Result<HashMap<String, Psk>, TlsKeysError> {
    let mut keys = HashMap::new();
    for (index, line) in file.reveal().split(|byte| *byte == b'\n').enumerate() {
        let line = line.trim_ascii();
        if line.is_empty() {
            continue;
        }
        let wrong = |reason| TlsKeysError::Line { path: path.to_path_buf(), line: index + 1, reason };
        let key = parse_key(line).map_err(wrong)?;
        if keys.insert(key.identity().to_string(), key).is_some() {
            return Err(wrong("a line before has the same name"));
        }
    }
    if keys.is_empty() {
        return Err(TlsKeysError::Line { path: path.to_path_buf(), line: 1, reason: "there is no key" });
    }
    Ok(keys)
}

/// The key of a line. Errors have nothing of the line, which is a secret.
fn parse_key(line: &[u8]) -> Result<Psk, &'static str> {
    const FORM: &str = "expected NAME:HEX, as psktool writes it, with a key of 16 to 64 bytes";
    let at = line.iter().position(|byte| *byte == b':').ok_or(FORM)?;
    let name = str::from_utf8(&line[..at]).map_err(|_| FORM)?;
    if name.chars().any(char::is_control) {
        return Err("the name has control characters");
    }
    if name.starts_with('#') {
        return Err("names in hexadecimal digits (#HEX) are not supported");
    }
    let key = decode_hex(&line[at + 1..]).ok_or(FORM)?;
    // The hash function of a key that came without one (RFC 8446, section 4.2.11).
    Psk::new(name, key, PskHash::Sha256).ok_or(FORM)
}

fn decode_hex(digits: &[u8]) -> Option<Secret> {
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|value| value as u8);
    let (pairs, rest) = digits.as_chunks::<2>();
    let bytes: Option<Vec<u8>> =
        pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect();
    bytes.filter(|_| rest.is_empty()).map(Secret::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<HashMap<String, Psk>, String> {
        let keys = parse_keys(Path::new("keys.psk"), &Secret::new(text));
        keys.map_err(|error| error.to_string())
    }

    #[test]
    fn a_file_of_psktool_has_a_key_a_line() {
        let keys = parse("alice:000102030405060708090a0b0c0d0e0f\n\nbob:FF0102030405060708090a0b0c0d0e0f\n");
        let mut names: Vec<_> = keys.unwrap().into_keys().collect();
        names.sort();
        assert_eq!(names, ["alice", "bob"]);
    }

    #[test]
    fn a_wrong_line_is_named_and_not_shown() {
        let good = "alice:000102030405060708090a0b0c0d0e0f";
        for (line, reason) in [
            ("bob", "expected NAME:HEX"),
            (":000102030405060708090a0b0c0d0e0f", "expected NAME:HEX"),
            ("bob:0001", "16 to 64 bytes"),
            ("bob:000102030405060708090a0b0c0d0e0", "expected NAME:HEX"),
            ("bob:zz0102030405060708090a0b0c0d0e0f", "expected NAME:HEX"),
            ("#626f62:000102030405060708090a0b0c0d0e0f", "not supported"),
            ("b\x1bb:000102030405060708090a0b0c0d0e0f", "control characters"),
            (good, "the same name"),
        ] {
            let error = parse(&format!("{good}\n{line}\n")).unwrap_err();
            assert!(error.starts_with("keys.psk, line 2: ") && error.contains(reason), "{line}: {error}");
            assert!(!error.contains("0001"), "{error}");
        }
        assert!(parse("\n").unwrap_err().contains("there is no key"));
    }
}
