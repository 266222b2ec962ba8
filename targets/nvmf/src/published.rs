//! What multicast DNS publishes.

use std::net::Ipv4Addr;
use std::sync::Arc;

use control::json::{Map, Value};
use mdns::Publisher;

/// A target whose discovery service is published, of the type that a module has.
pub(crate) struct PublishedTarget<T> {
    pub(crate) target: Arc<T>,
    /// Of the call that has published it.
    pub(crate) params: Map<String, Value>,
    /// In ascending order.
    pub(crate) addresses: Vec<(Ipv4Addr, u16)>,
    /// `None` while there is no address.
    pub(crate) publisher: Option<Publisher>,
}
