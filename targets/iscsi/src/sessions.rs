//! The sessions of the target, on all cores.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use scsi::CoreEvents;

/// What identifies a session: initiator port and target port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SessionKey {
    pub(crate) initiator: String,
    pub(crate) isid: [u8; 6],
    /// The target node; `None` for discovery, whose sessions do not exclude each other.
    pub(crate) node: u64,
    pub(crate) tag: u16,
}

/// The sessions, by their ports and with their identifiers. Shared by all cores; only logins and their ends take its lock.
#[derive(Debug, Default)]
pub(crate) struct Sessions(Mutex<SessionTable>);

#[derive(Debug, Default)]
struct SessionTable {
    by_key: BTreeMap<SessionKey, Arc<SessionControl>>,
    /// Identifiers in use, those of discovery included.
    used: BTreeSet<u16>,
    last_tsih: u16,
}

/// What others may ask of a session.
#[derive(Debug)]
pub(crate) struct SessionControl {
    /// It has to end: its initiator logs in again.
    is_ending: AtomicBool,
    events: Arc<CoreEvents>,
}

/// A session's entry in the table, removed when it is dropped.
#[derive(Debug)]
pub(crate) struct SessionHandle {
    sessions: Arc<Sessions>,
    key: Option<SessionKey>,
    control: Arc<SessionControl>,
    pub(crate) tsih: u16,
}

/// Why a session cannot begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EnterError {
    /// The session that it replaces has not ended yet; it was asked to.
    Busy,
    /// There are too many.
    TooMany,
}

impl SessionControl {
    pub(crate) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }

    pub(crate) fn end(&self) {
        self.is_ending.store(true, Ordering::Release);
        self.events.notify();
    }
}

impl Sessions {
    /// Adds a session on a core. `key` is `None` for discovery. A session with the same ports is asked to end, and has to
    /// have ended before (RFC 7143, section 6.3.5).
    pub(crate) fn enter(
        sessions: &Arc<Sessions>,
        key: Option<SessionKey>,
        events: &Arc<CoreEvents>,
    ) -> Result<SessionHandle, EnterError> {
        let mut table = sync::lock(&sessions.0);
        if let Some(old) = key.as_ref().and_then(|key| table.by_key.get(key)) {
            let old = old.clone();
            drop(table);
            old.end();
            return Err(EnterError::Busy);
        }
        let tsih = table.free_tsih().ok_or(EnterError::TooMany)?;
        table.used.insert(tsih);
        let control = Arc::new(SessionControl { is_ending: AtomicBool::new(false), events: events.clone() });
        if let Some(key) = &key {
            table.by_key.insert(key.clone(), control.clone());
        }
        drop(table);
        Ok(SessionHandle { sessions: sessions.clone(), key, control, tsih })
    }

    /// Whether there is a session with this identifier.
    pub(crate) fn has(&self, tsih: u16) -> bool {
        sync::lock(&self.0).used.contains(&tsih)
    }
}

impl SessionTable {
    /// 0 stands for a new session.
    fn free_tsih(&mut self) -> Option<u16> {
        for _ in 0..u16::MAX {
            self.last_tsih = self.last_tsih.checked_add(1).unwrap_or(1);
            if !self.used.contains(&self.last_tsih) {
                return Some(self.last_tsih);
            }
        }
        None
    }
}

impl SessionHandle {
    /// Whether the session has to end.
    pub(crate) fn is_ending(&self) -> bool {
        self.control.is_ending()
    }
}

impl Drop for SessionHandle {
    fn drop(&mut self) {
        let mut table = sync::lock(&self.sessions.0);
        table.used.remove(&self.tsih);
        if let Some(key) = &self.key {
            table.by_key.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(initiator: &str) -> Option<SessionKey> {
        Some(SessionKey { initiator: initiator.into(), isid: [1; 6], node: 1, tag: 1 })
    }

    #[test]
    fn a_session_with_the_same_ports_ends_first() {
        let (sessions, events) = (Arc::new(Sessions::default()), CoreEvents::new(None));
        let old = Sessions::enter(&sessions, key("iqn.a"), &events).unwrap();
        let other = Sessions::enter(&sessions, key("iqn.b"), &events).unwrap();
        assert_ne!(old.tsih, other.tsih);
        assert_eq!(Sessions::enter(&sessions, key("iqn.a"), &events).err(), Some(EnterError::Busy));
        assert!(old.is_ending() && !other.is_ending());
        drop(old);
        assert!(Sessions::enter(&sessions, key("iqn.a"), &events).is_ok());
    }

    #[test]
    fn identifiers_are_unique_and_never_0() {
        let (sessions, events) = (Arc::new(Sessions::default()), CoreEvents::new(None));
        let mut handles: Vec<SessionHandle> = Vec::new();
        for _ in 0..u16::MAX {
            handles.push(Sessions::enter(&sessions, None, &events).unwrap());
        }
        assert_eq!(Sessions::enter(&sessions, None, &events).err(), Some(EnterError::TooMany));
        let freed = handles.remove(100).tsih;
        assert!(!sessions.has(0) && !sessions.has(freed) && sessions.has(1));
        assert_eq!(Sessions::enter(&sessions, None, &events).unwrap().tsih, freed);
    }
}
