//! The sessions of the target, on all cores.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use scsi::{CoreEvents, SessionNexuses};

use crate::numbers::CommandNumbers;
use crate::parameters::Parameters;

/// What identifies a session: initiator port and target port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SessionKey {
    pub(crate) initiator: String,
    pub(crate) isid: [u8; 6],
    pub(crate) node: u64,
    pub(crate) tag: u16,
}

/// What a connection enters a session with.
#[derive(Clone, Debug)]
pub(crate) struct SessionEntry {
    /// `None` for discovery, whose sessions do not exclude each other.
    pub(crate) key: Option<SessionKey>,
    /// The session that it joins; `None` for a new one.
    pub(crate) joins: Option<u16>,
    pub(crate) cid: u16,
    /// Those of a new session.
    pub(crate) parameters: Parameters,
    /// The first command of a new session.
    pub(crate) cmd_sn: u32,
    /// Commands of a new session in flight.
    pub(crate) depth: u32,
    /// Sessions with which no new one begins, those of discovery included.
    pub(crate) sessions_max: u32,
}

/// The sessions, by their ports and identifiers. Shared by all cores; only logins and ends of connections
/// take its lock.
#[derive(Debug, Default)]
pub(crate) struct Sessions(Mutex<SessionTable>);

#[derive(Debug, Default)]
struct SessionTable {
    by_key: BTreeMap<SessionKey, u16>,
    /// Those of discovery included.
    by_tsih: BTreeMap<u16, Arc<SessionShared>>,
    last_tsih: u16,
}

/// What the connections of a session share, on any core: the numbers of commands, nexuses, and parameters.
#[derive(Debug)]
pub(crate) struct SessionShared {
    tsih: u16,
    key: Option<SessionKey>,
    pub(crate) parameters: Parameters,
    pub(crate) numbers: CommandNumbers,
    connections: Mutex<Vec<Arc<ConnectionControl>>>,
    pub(crate) nexuses: SessionNexuses,
}

/// What others may ask of a connection.
#[derive(Debug)]
pub(crate) struct ConnectionControl {
    cid: u16,
    /// It has to end: its initiator logs in again, or has ended the session.
    is_ending: AtomicBool,
    /// Nothing of it is in flight any more.
    has_ended: AtomicBool,
    /// Its initiator is to be asked to log out within this number of seconds; [`NO_LOGOUT`] if not.
    logout_seconds: AtomicU32,
    /// Those of the core that the connection is on.
    events: Mutex<Arc<CoreEvents>>,
}

/// In place of seconds, which have 16 bits.
const NO_LOGOUT: u32 = u32::MAX;

/// A connection's part in a session. The last one that is dropped ends the session.
#[derive(Debug)]
pub(crate) struct SessionHandle {
    sessions: Arc<Sessions>,
    shared: Arc<SessionShared>,
    control: Arc<ConnectionControl>,
}

/// Why a connection cannot enter a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EnterError {
    /// The session or connection that it replaces has not ended yet; it was asked to.
    Busy,
    /// There are too many sessions.
    TooMany,
    /// The session that it joins is not there.
    NoSession,
    /// The session that it joins has as many connections as were negotiated.
    TooManyConnections,
}

impl ConnectionControl {
    fn end(&self) {
        self.is_ending.store(true, Ordering::Release);
        self.notify();
    }

    /// Notifies the connection's core.
    fn notify(&self) {
        sync::lock(&self.events).notify();
    }

    /// Whether nothing of the connection is in flight any more.
    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }
}

impl SessionShared {
    /// Ends the connections that `which` selects by their identifiers.
    fn end(&self, which: impl Fn(&ConnectionControl) -> bool) {
        let connections = sync::lock(&self.connections).clone();
        connections.iter().filter(|control| which(control)).for_each(|control| control.end());
    }
}

impl Sessions {
    /// Enters a session: a new one, or one that exists. A session with the same ports, and a connection with
    /// the same identifier, are asked to end, and have to have ended before (RFC 7143, sections 6.3.4 and
    /// 6.3.5).
    pub(crate) fn enter(
        sessions: &Arc<Sessions>,
        entry: &SessionEntry,
        events: &Arc<CoreEvents>,
    ) -> Result<SessionHandle, EnterError> {
        let control = Arc::new(ConnectionControl {
            cid: entry.cid,
            is_ending: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
            logout_seconds: AtomicU32::new(NO_LOGOUT),
            events: Mutex::new(events.clone()),
        });
        let mut table = sync::lock(&sessions.0);
        let shared = match entry.joins {
            Some(tsih) => table.join(tsih, entry)?,
            None => table.begin(entry)?,
        };
        sync::lock(&shared.connections).push(control.clone());
        drop(table);
        Ok(SessionHandle { sessions: sessions.clone(), shared, control })
    }

    /// Has the initiators of a target node asked to log out within this number of seconds: those of one
    /// portal group if it is given. Reaches each connection, on whatever core, or between two.
    pub(crate) fn request_logouts(&self, node: u64, portal_group: Option<u16>, seconds: u16) {
        let table = sync::lock(&self.0);
        let is_concerned =
            |key: &SessionKey| key.node == node && portal_group.is_none_or(|tag| tag == key.tag);
        for shared in table.by_tsih.values().filter(|shared| shared.key.as_ref().is_some_and(is_concerned)) {
            for control in sync::lock(&shared.connections).iter() {
                control.logout_seconds.store(seconds.into(), Ordering::Release);
                control.notify();
            }
        }
    }

    /// Whether there is a session with this identifier, between these ports.
    pub(crate) fn has(&self, tsih: u16, key: &SessionKey) -> bool {
        let table = sync::lock(&self.0);
        table.by_tsih.get(&tsih).is_some_and(|shared| shared.key.as_ref() == Some(key))
    }
}

impl SessionTable {
    fn begin(&mut self, entry: &SessionEntry) -> Result<Arc<SessionShared>, EnterError> {
        let old = entry.key.as_ref().and_then(|key| self.by_key.get(key));
        if let Some(old) = old.and_then(|tsih| self.by_tsih.get(tsih)) {
            old.end(|_| true);
            return Err(EnterError::Busy);
        }
        if self.by_tsih.len() >= entry.sessions_max as usize {
            return Err(EnterError::TooMany);
        }
        let tsih = self.free_tsih().ok_or(EnterError::TooMany)?;
        let is_shared = entry.parameters.connections_max > 1;
        let shared = Arc::new(SessionShared {
            tsih,
            key: entry.key.clone(),
            parameters: entry.parameters,
            numbers: CommandNumbers::new(entry.cmd_sn, entry.depth, is_shared),
            connections: Mutex::default(),
            nexuses: SessionNexuses::default(),
        });
        self.by_tsih.insert(tsih, shared.clone());
        if let Some(key) = &entry.key {
            self.by_key.insert(key.clone(), tsih);
        }
        Ok(shared)
    }

    fn join(&self, tsih: u16, entry: &SessionEntry) -> Result<Arc<SessionShared>, EnterError> {
        let shared = self.by_tsih.get(&tsih).filter(|shared| entry.key.is_some() && shared.key == entry.key);
        let shared = shared.ok_or(EnterError::NoSession)?;
        let connections = sync::lock(&shared.connections);
        let is_full = connections.len() >= shared.parameters.connections_max as usize;
        let old = connections.iter().find(|control| control.cid == entry.cid).cloned();
        drop(connections);
        if let Some(old) = old {
            old.end();
            return Err(EnterError::Busy);
        }
        if is_full { Err(EnterError::TooManyConnections) } else { Ok(shared.clone()) }
    }

    /// 0 stands for a new session.
    fn free_tsih(&mut self) -> Option<u16> {
        for _ in 0..u16::MAX {
            self.last_tsih = self.last_tsih.checked_add(1).unwrap_or(1);
            if !self.by_tsih.contains_key(&self.last_tsih) {
                return Some(self.last_tsih);
            }
        }
        None
    }
}

impl SessionHandle {
    /// What the connections of the session share.
    #[inline]
    pub(crate) fn shared(&self) -> &Arc<SessionShared> {
        &self.shared
    }

    /// The session's identifier.
    pub(crate) fn tsih(&self) -> u16 {
        self.shared.tsih
    }

    /// Whether the connection has to end.
    pub(crate) fn is_ending(&self) -> bool {
        self.control.is_ending.load(Ordering::Acquire)
    }

    /// Seconds in which the initiator is to log out, once after it is asked for.
    pub(crate) fn take_logout_request(&self) -> Option<u16> {
        let seconds = self.control.logout_seconds.swap(NO_LOGOUT, Ordering::AcqRel);
        u16::try_from(seconds).ok()
    }

    /// Ends the other connections of the session.
    pub(crate) fn end_others(&self) {
        self.shared.end(|control| !std::ptr::eq(control, Arc::as_ptr(&self.control)));
    }

    /// Ends another connection of the session; `None` if there is none with this identifier. The cores of the
    /// others are notified when it [has ended](ConnectionControl::has_ended).
    pub(crate) fn end_other(&self, cid: u16) -> Option<Arc<ConnectionControl>> {
        let connections = sync::lock(&self.shared.connections).clone();
        let found = connections.iter().find(|control| control.cid == cid)?;
        found.end();
        Some(found.clone())
    }

    /// Notifies the cores of the session's connections.
    pub(crate) fn notify_all(&self) {
        sync::lock(&self.shared.connections).iter().for_each(|control| control.notify());
    }

    /// The connection has moved to the core with these events. What others have asked of it before, and of
    /// which the core that it was on was notified, has to be looked at after this.
    pub(crate) fn set_events(&self, events: &Arc<CoreEvents>) {
        *sync::lock(&self.control.events) = events.clone();
    }
}

impl Drop for SessionHandle {
    fn drop(&mut self) {
        let mut table = sync::lock(&self.sessions.0);
        let mut connections = sync::lock(&self.shared.connections);
        connections.retain(|control| !Arc::ptr_eq(control, &self.control));
        self.control.has_ended.store(true, Ordering::Release);
        if connections.is_empty() {
            table.by_tsih.remove(&self.shared.tsih);
            if let Some(key) = &self.shared.key {
                table.by_key.remove(key);
            }
        }
        connections.iter().for_each(|control| control.notify());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::SESSIONS_MAX;

    fn entry(initiator: &str) -> SessionEntry {
        let key = SessionKey { initiator: initiator.into(), isid: [1; 6], node: 1, tag: 1 };
        let parameters = Parameters { connections_max: 2, ..Parameters::default() };
        let sessions_max = SESSIONS_MAX;
        SessionEntry { key: Some(key), joins: None, cid: 1, parameters, cmd_sn: 1, depth: 8, sessions_max }
    }

    #[test]
    fn a_session_with_the_same_ports_ends_first() {
        let (sessions, events) = (Arc::new(Sessions::default()), CoreEvents::new(None));
        let old = Sessions::enter(&sessions, &entry("iqn.a"), &events).unwrap();
        let other = Sessions::enter(&sessions, &entry("iqn.b"), &events).unwrap();
        assert_ne!(old.tsih(), other.tsih());
        assert_eq!(Sessions::enter(&sessions, &entry("iqn.a"), &events).err(), Some(EnterError::Busy));
        assert!(old.is_ending() && !other.is_ending());
        drop(old);
        assert!(Sessions::enter(&sessions, &entry("iqn.a"), &events).is_ok());
    }

    #[test]
    fn connections_join_sessions_between_the_same_ports_and_replace_their_predecessors() {
        let (sessions, events) = (Arc::new(Sessions::default()), CoreEvents::new(None));
        let enter = |entry: &SessionEntry| Sessions::enter(&sessions, entry, &events);
        let first = enter(&entry("iqn.a")).unwrap();
        let joins =
            |initiator: &str, cid: u16| SessionEntry { joins: Some(first.tsih()), cid, ..entry(initiator) };
        assert_eq!(enter(&joins("iqn.b", 2)).err(), Some(EnterError::NoSession));
        let second = enter(&joins("iqn.a", 2)).unwrap();
        assert_eq!(second.tsih(), first.tsih());
        assert_eq!(enter(&joins("iqn.a", 3)).err(), Some(EnterError::TooManyConnections));
        assert!(!first.is_ending() && !second.is_ending());
        assert_eq!(enter(&joins("iqn.a", 1)).err(), Some(EnterError::Busy));
        assert!(first.is_ending() && !second.is_ending());
        let (tsih, again) = (first.tsih(), joins("iqn.a", 1));
        drop(first);
        let first = enter(&again).unwrap();
        assert_eq!(first.tsih(), tsih);
        let closing = first.end_other(2).unwrap();
        assert!(second.is_ending() && first.end_other(9).is_none());
        assert!(!closing.has_ended());
        drop(second);
        assert!(closing.has_ended());
        // The session is there until its last connection has ended.
        let key = entry("iqn.a").key.unwrap();
        assert!(sessions.has(tsih, &key));
        drop(first);
        assert!(!sessions.has(tsih, &key));
        assert_eq!(enter(&again).err(), Some(EnterError::NoSession));
    }

    #[test]
    fn sessions_are_not_more_than_the_options_allow_and_connections_of_theirs_still_join() {
        let (sessions, events) = (Arc::new(Sessions::default()), CoreEvents::new(None));
        let enter = |entry: SessionEntry| {
            Sessions::enter(&sessions, &SessionEntry { sessions_max: 2, ..entry }, &events)
        };
        let first = enter(entry("iqn.a")).unwrap();
        let discovery = enter(SessionEntry { key: None, ..entry("iqn.b") }).unwrap();
        assert_eq!(enter(entry("iqn.b")).err(), Some(EnterError::TooMany));
        assert!(enter(SessionEntry { joins: Some(first.tsih()), cid: 2, ..entry("iqn.a") }).is_ok());
        // One that replaces a session waits for it, as its place becomes free.
        assert_eq!(enter(entry("iqn.a")).err(), Some(EnterError::Busy));
        drop(discovery);
        assert!(enter(entry("iqn.b")).is_ok());
    }

    #[test]
    fn identifiers_are_unique_and_never_0() {
        let (sessions, events) = (Arc::new(Sessions::default()), CoreEvents::new(None));
        let discovery = SessionEntry { key: None, ..entry("iqn.a") };
        let mut handles: Vec<SessionHandle> = Vec::new();
        for _ in 0..u16::MAX {
            handles.push(Sessions::enter(&sessions, &discovery, &events).unwrap());
        }
        assert_eq!(Sessions::enter(&sessions, &discovery, &events).err(), Some(EnterError::TooMany));
        assert!(handles.iter().all(|handle| handle.tsih() != 0));
        let freed = handles.remove(100).tsih();
        assert_eq!(Sessions::enter(&sessions, &discovery, &events).unwrap().tsih(), freed);
    }
}
