//! Process-wide registry of attached controllers, so that every core shares one attachment.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use crate::handle::ControllerHandle;

static ATTACHED: Mutex<Option<HashMap<String, AttachState>>> = Mutex::new(None);

enum AttachState {
    /// A core is attaching the controller.
    Attaching,
    /// The controller is attached, or shutting down after its last handle was dropped.
    Attached(Weak<ControllerHandle>),
}

/// Result of looking up a controller.
pub(crate) enum AttachLookup {
    /// The controller is attached.
    Attached(Arc<ControllerHandle>),
    /// The controller is being attached or shut down: retry.
    Busy,
    /// The controller is not attached: the caller attaches it and holds the claim meanwhile.
    Vacant(AttachClaim),
}

/// The exclusive right to attach a controller. If it is dropped unused, the next core may attach.
pub(crate) struct AttachClaim {
    key: String,
    used: bool,
}

pub(crate) fn find(key: &str) -> AttachLookup {
    let mut attached = sync::lock(&ATTACHED);
    let attached = attached.get_or_insert_default();
    match attached.get(key) {
        Some(AttachState::Attaching) => AttachLookup::Busy,
        Some(AttachState::Attached(handle)) => match handle.upgrade() {
            Some(handle) => AttachLookup::Attached(handle),
            None => AttachLookup::Busy,
        },
        None => {
            attached.insert(key.to_string(), AttachState::Attaching);
            AttachLookup::Vacant(AttachClaim { key: key.to_string(), used: false })
        }
    }
}

/// The key of an attached controller. Dropped after the device, it lets others attach the controller.
pub(crate) struct AttachedKey(String);

impl Drop for AttachedKey {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

fn remove(key: &str) {
    if let Some(attached) = sync::lock(&ATTACHED).as_mut() {
        attached.remove(key);
    }
}

impl AttachClaim {
    /// What removes the controller's entry; it is dropped after the controller's device.
    pub(crate) fn attached_key(&self) -> AttachedKey {
        AttachedKey(self.key.clone())
    }

    /// Registers the attached controller, until its [`AttachedKey`] is dropped.
    pub(crate) fn attached(mut self, handle: Weak<ControllerHandle>) {
        self.used = true;
        if let Some(attached) = sync::lock(&ATTACHED).as_mut() {
            attached.insert(self.key.clone(), AttachState::Attached(handle));
        }
    }
}

impl Drop for AttachClaim {
    fn drop(&mut self) {
        if !self.used {
            remove(&self.key);
        }
    }
}
