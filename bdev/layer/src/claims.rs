//! Claims: which opens of a device exclude which others, as SPDK's `spdk_bdev_module_claim_bdev_desc`.
//!
//! Reads are always allowed. A claim says who may write: the holder alone, no one, or all that share a key.
//! The rules are one function, [`DeviceClaims::check`], and one table in `tests/claims.rs`.

use crate::BdevError;

/// How a device is opened: which I/O is allowed, and which other opens are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access<'a> {
    /// Reads only; writes are rejected. Compatible with every other open.
    ReadOnly,
    /// Reads and writes; other writers are allowed. Refused while there is a claim.
    ReadWrite,
    /// Reads and writes with an exclusive-write claim: no other writer, and no other claim, while this is
    /// open.
    Exclusive {
        /// The holder, named in the error that other writers get.
        by: &'a str,
    },
    /// Reads and writes with a claim that says that readers are expected: no other writer, and no other
    /// claim.
    ReadManyWriteOne {
        /// The holder.
        by: &'a str,
    },
    /// Reads, with a claim that there is no writer. Any number of holders.
    ReadManyWriteNone {
        /// The holder.
        by: &'a str,
    },
    /// Reads and writes with a claim that writers have in common if they give the same key.
    ReadManyWriteShared {
        /// The holder.
        by: &'a str,
        /// What the holders agree on, not 0: an identity of what they share, such as a cluster's.
        key: u64,
    },
}

/// What a claim of a device allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimType {
    /// One holder, which writes.
    ExclusiveWrite,
    /// One holder, which writes, and readers.
    ReadManyWriteOne,
    /// Holders and readers, of which none writes.
    ReadManyWriteNone,
    /// Holders with one key, which write, and readers.
    ReadManyWriteShared,
}

impl ClaimType {
    /// The name in `bdev_get_bdevs`, which is SPDK's.
    pub const fn name(self) -> &'static str {
        match self {
            ClaimType::ExclusiveWrite => "exclusive_write",
            ClaimType::ReadManyWriteOne => "read_many_write_one",
            ClaimType::ReadManyWriteNone => "read_many_write_none",
            ClaimType::ReadManyWriteShared => "read_many_write_shared",
        }
    }
}

impl<'a> Access<'a> {
    /// Whether it allows writes.
    pub const fn writes(self) -> bool {
        !matches!(self, Access::ReadOnly | Access::ReadManyWriteNone { .. })
    }

    /// The claim that it makes, with its holder and key; the key is 0 of all but a shared one.
    const fn claim(self) -> Option<(ClaimType, &'a str, u64)> {
        match self {
            Access::ReadOnly | Access::ReadWrite => None,
            Access::Exclusive { by } => Some((ClaimType::ExclusiveWrite, by, 0)),
            Access::ReadManyWriteOne { by } => Some((ClaimType::ReadManyWriteOne, by, 0)),
            Access::ReadManyWriteNone { by } => Some((ClaimType::ReadManyWriteNone, by, 0)),
            Access::ReadManyWriteShared { by, key } => Some((ClaimType::ReadManyWriteShared, by, key)),
        }
    }
}

/// The opens of one device, and the claims among them.
#[derive(Default)]
pub(crate) struct DeviceClaims {
    /// Opens that allow writes, with a claim or without.
    writers: u32,
    /// Type and key of the claims, which all have the same while there are any.
    kind: Option<(ClaimType, u64)>,
    /// Number of the open, and holder.
    holders: Vec<(u64, String)>,
}

impl DeviceClaims {
    /// Type and holders; `None` without a claim.
    pub(crate) fn current(&self) -> Option<(ClaimType, Vec<String>)> {
        let (kind, _) = self.kind?;
        Some((kind, self.holders.iter().map(|(_, by)| by.clone()).collect()))
    }

    /// Fails if the present opens of the device `name` exclude this one.
    pub(crate) fn check(&self, name: &str, access: Access<'_>) -> Result<(), BdevError> {
        let claimed = |by: String| Err(BdevError::Claimed { name: name.to_string(), by });
        let wanted = access.claim();
        if let Some((ClaimType::ReadManyWriteShared, _, 0)) = wanted {
            return Err(BdevError::invalid("key", "a shared claim needs a key that is not 0"));
        }
        if let Some((kind, key)) = self.kind {
            let joins = matches!(kind, ClaimType::ReadManyWriteNone | ClaimType::ReadManyWriteShared)
                && wanted.is_some_and(|(wanted, _, wanted_key)| (wanted, wanted_key) == (kind, key));
            if !joins && (wanted.is_some() || access.writes()) {
                let holders: Vec<&str> = self.holders.iter().map(|(_, by)| by.as_str()).collect();
                return claimed(holders.join(", "));
            }
        } else if wanted.is_some() && self.writers > 0 {
            return claimed(format!("{} other writer(s)", self.writers));
        }
        Ok(())
    }

    /// Adds an open that was [checked](Self::check).
    pub(crate) fn add(&mut self, number: u64, access: Access<'_>) {
        self.writers += u32::from(access.writes());
        if let Some((kind, by, key)) = access.claim() {
            self.kind = Some((kind, key));
            self.holders.push((number, by.to_string()));
        }
    }

    /// Removes an open that has ended.
    pub(crate) fn remove(&mut self, number: u64, writes: bool) {
        self.writers -= u32::from(writes);
        self.holders.retain(|(holder, _)| *holder != number);
        if self.holders.is_empty() {
            self.kind = None;
        }
    }
}
