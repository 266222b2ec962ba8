//! Which hash functions and groups may be used, by SPDK's names.

use wire_nvme::auth::{AuthHash, DhGroup};

/// The hash functions and groups that an end accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthOptions {
    /// Hash functions, at least one.
    pub hashes: Vec<AuthHash>,
    /// Groups, at least one.
    pub groups: Vec<DhGroup>,
}

impl Default for AuthOptions {
    /// All.
    fn default() -> AuthOptions {
        AuthOptions { hashes: AuthHash::ALL.to_vec(), groups: DhGroup::ALL.to_vec() }
    }
}

/// Why names are not options.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthOptionsError {
    /// Not a hash function.
    #[error("{0} is not a digest of DH-HMAC-CHAP; sha256, sha384 and sha512 are")]
    Hash(String),
    /// Not a group.
    #[error(
        "{0} is not a group of DH-HMAC-CHAP; null, ffdhe2048, ffdhe3072, ffdhe4096, ffdhe6144 and ffdhe8192 are"
    )]
    Group(String),
    /// None at all.
    #[error("at least one is needed")]
    Empty,
}

impl AuthOptions {
    /// Parses names of hash functions.
    ///
    /// # Errors
    /// An unknown name, or none.
    pub fn parse_hashes(names: &[String]) -> Result<Vec<AuthHash>, AuthOptionsError> {
        let one = |name: &String| {
            let found = AuthHash::ALL.iter().find(|hash| hash_name(**hash) == name).copied();
            found.ok_or_else(|| AuthOptionsError::Hash(name.chars().take(64).collect()))
        };
        parse(names, one)
    }

    /// Parses names of groups.
    ///
    /// # Errors
    /// An unknown name, or none.
    pub fn parse_groups(names: &[String]) -> Result<Vec<DhGroup>, AuthOptionsError> {
        let one = |name: &String| {
            let found = DhGroup::ALL.iter().find(|group| group_name(**group) == name).copied();
            found.ok_or_else(|| AuthOptionsError::Group(name.chars().take(64).collect()))
        };
        parse(names, one)
    }

    /// The names of the hash functions.
    pub fn hash_names(&self) -> Vec<String> {
        self.hashes.iter().map(|hash| hash_name(*hash).to_string()).collect()
    }

    /// The names of the groups.
    pub fn group_names(&self) -> Vec<String> {
        self.groups.iter().map(|group| group_name(*group).to_string()).collect()
    }

    /// The strongest hash function that is accepted and in a peer's list.
    pub(crate) fn select_hash(&self, of_peer: &[u8]) -> Option<AuthHash> {
        self.hashes.iter().copied().filter(|hash| of_peer.contains(&hash.to_wire())).max()
    }

    /// The weakest one.
    pub(crate) fn select_weakest_hash(&self, of_peer: &[u8]) -> Option<AuthHash> {
        self.hashes.iter().copied().filter(|hash| of_peer.contains(&hash.to_wire())).min()
    }

    /// The largest group that is accepted and in a peer's list.
    pub(crate) fn select_group(&self, of_peer: &[u8]) -> Option<DhGroup> {
        self.groups.iter().copied().filter(|group| of_peer.contains(&group.to_wire())).max()
    }
}

/// Each once, in ascending order.
fn parse<T: Ord>(
    names: &[String],
    one: impl Fn(&String) -> Result<T, AuthOptionsError>,
) -> Result<Vec<T>, AuthOptionsError> {
    let mut found = names.iter().map(one).collect::<Result<Vec<T>, _>>()?;
    found.sort();
    found.dedup();
    if found.is_empty() { Err(AuthOptionsError::Empty) } else { Ok(found) }
}

fn hash_name(hash: AuthHash) -> &'static str {
    match hash {
        AuthHash::Sha256 => "sha256",
        AuthHash::Sha384 => "sha384",
        AuthHash::Sha512 => "sha512",
    }
}

fn group_name(group: DhGroup) -> &'static str {
    match group {
        DhGroup::Null => "null",
        DhGroup::Ffdhe2048 => "ffdhe2048",
        DhGroup::Ffdhe3072 => "ffdhe3072",
        DhGroup::Ffdhe4096 => "ffdhe4096",
        DhGroup::Ffdhe6144 => "ffdhe6144",
        DhGroup::Ffdhe8192 => "ffdhe8192",
    }
}
