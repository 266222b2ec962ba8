//! Which ports have TLS.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

/// The ports whose connections begin with TLS, for all cores. Asked once for each connection.
#[derive(Clone, Default)]
pub(crate) struct SecurePorts(Arc<Mutex<BTreeSet<u16>>>);

impl SecurePorts {
    /// Notes whether a port, which is opened after this, is one.
    pub(crate) fn set(&self, portid: u16, secure: bool) {
        let mut ports = sync::lock(&self.0);
        match secure {
            true => ports.insert(portid),
            false => ports.remove(&portid),
        };
    }

    pub(crate) fn contains(&self, portid: u16) -> bool {
        sync::lock(&self.0).contains(&portid)
    }
}
