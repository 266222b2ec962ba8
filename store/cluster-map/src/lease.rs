//! Which process is a node.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A process that is a node, or wants to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseHolder {
    /// Random, of each start of a node.
    pub id: Uuid,
    /// Where it listens.
    pub address: String,
    /// The boot of its machine and its directory. A process that has opened the node's device there is in the
    /// place of one that has ended, and waits for no lease.
    pub place: String,
}

impl LeaseHolder {
    /// Whether this process takes over from one that holds a lease still.
    pub(crate) fn replaces(&self, other: &LeaseHolder) -> bool {
        self.id == other.id || (self.place == other.place && !self.place.is_empty())
    }
}

/// The outcome of a renewal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseOutcome {
    /// The process is the node.
    Held,
    /// Another process is.
    Taken(LeaseHolder),
}
