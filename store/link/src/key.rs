//! The key of a cluster, and those of clients, which follow from it.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use wire_replica::KeyName;

/// Most bytes of a key's file.
const FILE_BYTES_MAX: u64 = 128;

/// What all nodes of a cluster know, and clients with all rights: 32 random bytes. It is never printed.
#[derive(Clone)]
pub struct ClusterKey([u8; 32]);

impl ClusterKey {
    /// A key of these bytes.
    pub fn from_bytes(bytes: [u8; 32]) -> ClusterKey {
        ClusterKey(bytes)
    }

    /// Makes a key, and writes it to a new file that only its owner can read.
    ///
    /// # Errors
    /// `AlreadyExists`, and what the system reports.
    pub fn create(path: &Path) -> io::Result<ClusterKey> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes).map_err(|_| io::Error::other("the system has no random numbers"))?;
        write_private(path, &digits(&bytes))?;
        Ok(ClusterKey(bytes))
    }

    /// Reads the key in a file: 64 hexadecimal digits.
    ///
    /// # Errors
    /// `InvalidData` if it is something else, `PermissionDenied` if others than its owner may use the file, and what the
    /// system reports.
    pub fn load(path: &Path) -> io::Result<ClusterKey> {
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "a key is 64 hexadecimal digits");
        let text = read_private(path)?.ok_or_else(invalid)?;
        if let Some((name, _)) = text.split_once(':') {
            let name = KeyName::new(name.trim()).ok_or_else(invalid)?;
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("it is the key {name} of a client, and the cluster's key is needed"),
            ));
        }
        parse_digits(&text).map(ClusterKey).ok_or_else(invalid)
    }

    /// The key of a client. Nodes compute it again for each connection from what is known of it, so that no secret needs to be
    /// stored: `context` is all that gives it its rights, and another context is another key.
    pub fn client_key(&self, name: KeyName, context: &[u8]) -> ClientKey {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        // Apart from the labels of proofs.
        mac.update(b"client key\0");
        mac.update(name.as_str().as_bytes());
        mac.update(b"\0");
        mac.update(context);
        ClientKey { name, secret: mac.finalize().into_bytes().into() }
    }
}

/// What a client with some rights knows. It is never printed.
#[derive(Clone)]
pub struct ClientKey {
    name: KeyName,
    secret: [u8; 32],
}

impl ClientKey {
    /// Its name.
    pub fn name(&self) -> KeyName {
        self.name
    }

    /// Writes it to a new file that only its owner can read: `NAME:` and 64 hexadecimal digits.
    ///
    /// # Errors
    /// `AlreadyExists`, and what the system reports.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        write_private(path, &format!("{}:{}", self.name, digits(&self.secret)))
    }
}

/// What an end of a connection proves that it knows.
#[derive(Clone)]
pub enum LinkKey {
    /// The cluster's key: of nodes, and of clients with all rights.
    Cluster(ClusterKey),
    /// A client's key.
    Client(ClientKey),
}

impl LinkKey {
    /// Reads either from a file.
    ///
    /// # Errors
    /// As [`ClusterKey::load`].
    pub fn load(path: &Path) -> io::Result<LinkKey> {
        let invalid = || {
            let reason = "a key is 64 hexadecimal digits, after its name and a colon if it is a client's";
            io::Error::new(io::ErrorKind::InvalidData, reason)
        };
        let text = read_private(path)?.ok_or_else(invalid)?;
        let Some((name, secret)) = text.split_once(':') else {
            return parse_digits(&text).map(ClusterKey).map(LinkKey::Cluster).ok_or_else(invalid);
        };
        let key = KeyName::new(name.trim()).zip(parse_digits(secret));
        key.map(|(name, secret)| LinkKey::Client(ClientKey { name, secret })).ok_or_else(invalid)
    }

    /// The name of a client's key.
    pub fn name(&self) -> Option<KeyName> {
        match self {
            LinkKey::Cluster(_) => None,
            LinkKey::Client(key) => Some(key.name),
        }
    }

    pub(crate) fn secret(&self) -> &[u8; 32] {
        match self {
            LinkKey::Cluster(key) => &key.0,
            LinkKey::Client(key) => &key.secret,
        }
    }
}

impl From<ClusterKey> for LinkKey {
    fn from(key: ClusterKey) -> LinkKey {
        LinkKey::Cluster(key)
    }
}

impl From<ClientKey> for LinkKey {
    fn from(key: ClientKey) -> LinkKey {
        LinkKey::Client(key)
    }
}

/// The keys of clients that a node takes.
#[derive(Clone, Default)]
pub struct ClientKeys(BTreeMap<KeyName, [u8; 32]>);

impl ClientKeys {
    pub(crate) fn secret(&self, name: KeyName) -> Option<[u8; 32]> {
        self.0.get(&name).copied()
    }
}

impl FromIterator<ClientKey> for ClientKeys {
    fn from_iter<I: IntoIterator<Item = ClientKey>>(keys: I) -> ClientKeys {
        ClientKeys(keys.into_iter().map(|key| (key.name, key.secret)).collect())
    }
}

// Secrets are not printed.
impl fmt::Debug for ClientKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

fn digits(bytes: &[u8; 32]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes of 64 hexadecimal digits.
fn parse_digits(text: &str) -> Option<[u8; 32]> {
    let digits = text.trim().as_bytes();
    let mut bytes = [0; 32];
    if digits.len() != 2 * bytes.len() || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    for (byte, digits) in bytes.iter_mut().zip(digits.chunks(2)) {
        *byte = u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(bytes)
}

/// Writes a line to a new file that its owner alone can use.
fn write_private(path: &Path, line: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(format!("{line}\n").as_bytes())?;
    file.sync_all()
}

/// The text of a file that its owner alone can use; `None` if it is too long or no text.
fn read_private(path: &Path) -> io::Result<Option<String>> {
    // Looked at before it is opened: opening a FIFO would wait for a writer.
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a regular file"));
    }
    let file = File::open(path)?;
    let mode = file.metadata()?.mode();
    if mode & 0o077 != 0 {
        let reason = format!("others than its owner may use it, mode {:03o}: chmod 600", mode & 0o777);
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
    }
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    Ok(String::from_utf8(bytes).ok().filter(|text| text.len() as u64 <= FILE_BYTES_MAX))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_key_that_others_may_use_is_refused() {
        let path = std::env::temp_dir().join(format!("ringbolt-key-{}", std::process::id()));
        let _ = fs::remove_file(&path);
        let key = ClusterKey::create(&path).unwrap();
        assert_eq!(ClusterKey::load(&path).unwrap().0, key.0);
        for mode in [0o644, 0o640, 0o601] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let error = ClusterKey::load(&path).map(drop).unwrap_err().to_string();
            assert_eq!(error, format!("others than its owner may use it, mode {mode:03o}: chmod 600"));
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
        ClusterKey::load(&path).unwrap();
        fs::remove_file(&path).unwrap();
        // What is no file has no end, perhaps.
        let error = ClusterKey::load(Path::new("/dev/zero")).map(drop).unwrap_err().to_string();
        assert_eq!(error, "it is not a regular file");
    }

    #[test]
    fn a_clients_key_follows_from_all_that_gives_it_its_rights() {
        let (cluster, other) = (ClusterKey::from_bytes([1; 32]), ClusterKey::from_bytes([2; 32]));
        let [name, second] = ["a", "b"].map(|name| KeyName::new(name).unwrap());
        let key = cluster.client_key(name, b"rights");
        assert_eq!(key.secret, cluster.client_key(name, b"rights").secret);
        for another in [
            other.client_key(name, b"rights"),
            cluster.client_key(second, b"rights"),
            cluster.client_key(name, b"more rights"),
        ] {
            assert_ne!(key.secret, another.secret);
        }
        let path = std::env::temp_dir().join(format!("ringbolt-client-key-{}", std::process::id()));
        let _ = fs::remove_file(&path);
        key.save(&path).unwrap();
        assert_eq!(key.save(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        let loaded = LinkKey::load(&path).unwrap();
        assert_eq!((loaded.name(), loaded.secret()), (Some(name), &key.secret));
        let error = ClusterKey::load(&path).map(drop).unwrap_err().to_string();
        assert_eq!(error, "it is the key a of a client, and the cluster's key is needed");
        for wrong in ["a:00", ":", "a b:00", &format!("a:{}", "+1".repeat(32)), &"0".repeat(200)] {
            fs::write(&path, wrong).unwrap();
            let error = LinkKey::load(&path).map(drop).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{wrong}");
        }
        fs::remove_file(&path).unwrap();
    }
}
