//! The controllers that this process has attached, so that every core finds the one that is there.

use std::collections::HashMap;
use std::sync::{Mutex, Weak};

use crate::controller::{Controller, Handle};
use crate::shared::lock;

static ATTACHED: Mutex<Option<HashMap<String, Entry>>> = Mutex::new(None);

enum Entry {
    /// Somebody is about to attach it.
    Attaching,
    /// It is there, or its last user has let go and it is being shut down.
    Attached(Weak<Handle>),
}

/// What is known of a controller.
pub(crate) enum Found {
    /// It is attached.
    Here(Controller),
    /// It is on its way in or out: look again soon.
    Busy,
    /// Nobody has it: the caller attaches it, and holds this meanwhile.
    Free(Claim),
}

/// The right to attach a controller. Dropped unused, it leaves it to the next.
pub(crate) struct Claim {
    key: String,
    used: bool,
}

pub(crate) fn find(key: &str) -> Found {
    let mut attached = lock(&ATTACHED);
    let attached = attached.get_or_insert_default();
    match attached.get(key) {
        Some(Entry::Attaching) => Found::Busy,
        Some(Entry::Attached(handle)) => match handle.upgrade() {
            Some(handle) => Found::Here(Controller::from_handle(handle)),
            None => Found::Busy,
        },
        None => {
            attached.insert(key.to_string(), Entry::Attaching);
            Found::Free(Claim { key: key.to_string(), used: false })
        }
    }
}

/// The controller's device was let go of.
pub(crate) fn forget(key: &str) {
    if let Some(attached) = lock(&ATTACHED).as_mut() {
        attached.remove(key);
    }
}

impl Claim {
    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    /// The controller is attached; its end will [`forget`] the name.
    pub(crate) fn attached(mut self, handle: Weak<Handle>) {
        self.used = true;
        if let Some(attached) = lock(&ATTACHED).as_mut() {
            attached.insert(self.key.clone(), Entry::Attached(handle));
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.used {
            forget(&self.key);
        }
    }
}
