//! The key of a cluster, and those of clients, which follow from it.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io;
use std::path::Path;

use hmac::{Hmac, KeyInit, Mac};
use secret::Secret;
use sha2::Sha256;
use wire_replica::KeyName;

/// Most bytes of a key's file.
const FILE_BYTES_MAX: usize = 128;
/// Bytes of a key.
const KEY_BYTES: usize = 32;

/// What all nodes of a cluster know, and clients with all rights: 32 random bytes.
#[derive(Clone, Debug)]
pub struct ClusterKey(Secret);

impl ClusterKey {
    /// A key of these bytes.
    pub fn from_bytes(bytes: [u8; KEY_BYTES]) -> ClusterKey {
        ClusterKey(Secret::new(bytes))
    }

    /// Makes a key, and writes it to a new file that only its owner can read.
    ///
    /// # Errors
    /// `AlreadyExists`, and what the system reports.
    pub fn create(path: &Path) -> io::Result<ClusterKey> {
        let mut bytes = vec![0; KEY_BYTES];
        getrandom::fill(&mut bytes).map_err(|_| io::Error::other("the system has no random numbers"))?;
        let key = Secret::new(bytes);
        line("", &key).write_new(path)?;
        Ok(ClusterKey(key))
    }

    /// Reads the key in a file: 64 hexadecimal digits.
    ///
    /// # Errors
    /// `InvalidData` if it is something else, `PermissionDenied` if others than its owner may use the file or
    /// it is another user's, and what the system reports.
    pub fn load(path: &Path) -> io::Result<ClusterKey> {
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "a key is 64 hexadecimal digits");
        let file = Secret::read(path, FILE_BYTES_MAX)?;
        let text = file.reveal_text().ok_or_else(invalid)?;
        if let Some((name, _)) = text.split_once(':') {
            let name = KeyName::new(name.trim()).ok_or_else(invalid)?;
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("it is the key {name} of a client, and the cluster's key is needed"),
            ));
        }
        parse_digits(text).map(ClusterKey).ok_or_else(invalid)
    }

    /// The key of a client. Nodes compute it again for each connection from what is known of it, so that no secret needs to be
    /// stored: `context` is all that gives it its rights, and another context is another key.
    pub fn client_key(&self, name: KeyName, context: &[u8]) -> ClientKey {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.0.reveal()).expect("HMAC takes keys of any length");
        // Apart from the labels of proofs.
        mac.update(b"client key\0");
        mac.update(name.as_str().as_bytes());
        mac.update(b"\0");
        mac.update(context);
        ClientKey { name, secret: Secret::new(mac.finalize().into_bytes().to_vec()) }
    }
}

/// What a client with some rights knows.
#[derive(Clone, Debug)]
pub struct ClientKey {
    name: KeyName,
    secret: Secret,
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
        line(&format!("{}:", self.name), &self.secret).write_new(path)
    }
}

/// What an end of a connection proves that it knows.
#[derive(Clone, Debug)]
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
        let file = Secret::read(path, FILE_BYTES_MAX)?;
        let text = file.reveal_text().ok_or_else(invalid)?;
        let Some((name, secret)) = text.split_once(':') else {
            return parse_digits(text).map(ClusterKey).map(LinkKey::Cluster).ok_or_else(invalid);
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

    pub(crate) fn secret(&self) -> &Secret {
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
#[derive(Clone, Debug, Default)]
pub struct ClientKeys(BTreeMap<KeyName, Secret>);

impl ClientKeys {
    pub(crate) fn secret(&self, name: KeyName) -> Option<&Secret> {
        self.0.get(&name)
    }
}

impl FromIterator<ClientKey> for ClientKeys {
    fn from_iter<I: IntoIterator<Item = ClientKey>>(keys: I) -> ClientKeys {
        ClientKeys(keys.into_iter().map(|key| (key.name, key.secret)).collect())
    }
}

/// The line of a file: the key in hexadecimal digits.
fn line(prefix: &str, key: &Secret) -> Secret {
    // With its whole capacity: a string that grows leaves a part of it in memory.
    let mut text = String::with_capacity(prefix.len() + 2 * KEY_BYTES + 1);
    text.push_str(prefix);
    for byte in key.reveal() {
        write!(text, "{byte:02x}").expect("a string takes all that is written");
    }
    text.push('\n');
    Secret::new(text)
}

/// The bytes of 64 hexadecimal digits.
fn parse_digits(text: &str) -> Option<Secret> {
    let digits = text.trim().as_bytes();
    if digits.len() != 2 * KEY_BYTES || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let mut bytes = Vec::with_capacity(KEY_BYTES);
    for digits in digits.chunks(2) {
        bytes.push(u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()?);
    }
    Some(Secret::new(bytes))
}

#[cfg(test)]
mod tests {
    use std::fs;
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
        assert!(error.contains("not a regular file"), "{error}");
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
        // What is logged of keys has none.
        let keys: ClientKeys = [key.clone()].into_iter().collect();
        let printed = format!("{:?} {keys:?}", LinkKey::from(cluster));
        assert_eq!(printed, "Cluster(ClusterKey(…)) ClientKeys({\"a\": …})");
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
