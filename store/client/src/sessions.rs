//! The sessions of a channel: one in each logical group that it writes to.

use wire_replica::SESSIONS_MAX;

/// How often a warning is repeated.
const WARN_NS: u64 = 60_000_000_000;

/// A session in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupSession {
    /// The client that it is of: each session has another one.
    pub(crate) client: u64,
    pub(crate) state: SessionState,
    /// When the group is to hear of it again.
    pub(crate) renew_ns: u64,
}

/// How far a session is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SessionState {
    /// There is none.
    None,
    /// The group was asked.
    Opening,
    /// Writes carry its token; 0 from a node of a version without sessions.
    Open { token: u32 },
    /// The client's key may only read.
    Denied,
}

/// A number for a client that no other one has.
pub(crate) fn new_client() -> u64 {
    let mut client = [0; 8];
    // Without random numbers, the time tells clients apart.
    if getrandom::fill(&mut client).is_err() {
        client = os::clock::now_ns().to_le_bytes();
    }
    // 0 is no client.
    u64::from_le_bytes(client).max(1)
}

impl GroupSession {
    pub(crate) fn new() -> GroupSession {
        GroupSession { client: new_client(), state: SessionState::None, renew_ns: 0 }
    }

    fn is_open(&self) -> bool {
        matches!(self.state, SessionState::Open { .. })
    }
}

/// The sessions of a channel, by group.
pub(crate) struct GroupSessions {
    first_group: u32,
    groups: Vec<GroupSession>,
    /// When the first of those that are open is renewed; `u64::MAX` if none is.
    due_ns: u64,
    warn_ns: u64,
}

impl GroupSessions {
    /// A group hears of a session this often. It keeps one that is silent for six times as long.
    pub(crate) const RENEW_NS: u64 = 20_000_000_000;

    pub(crate) fn new(first_group: u32, groups: u32) -> GroupSessions {
        let groups = (0..groups).map(|_| GroupSession::new()).collect();
        GroupSessions { first_group, groups, due_ns: u64::MAX, warn_ns: 0 }
    }

    pub(crate) fn of(&self, group: u32) -> Option<&GroupSession> {
        self.groups.get(group.checked_sub(self.first_group)? as usize)
    }

    pub(crate) fn of_mut(&mut self, group: u32) -> Option<&mut GroupSession> {
        self.groups.get_mut(group.checked_sub(self.first_group)? as usize)
    }

    /// The groups with a session, and the client of each.
    pub(crate) fn open(&self) -> Vec<(u32, u64)> {
        let groups = (self.first_group..).zip(&self.groups);
        groups.filter(|(_, it)| it.is_open()).map(|(group, it)| (group, it.client)).collect()
    }

    /// After a session was opened or has ended.
    pub(crate) fn count_open(&mut self) {
        let open = self.groups.iter().filter(|session| session.is_open());
        self.due_ns = open.map(|session| session.renew_ns).min().unwrap_or(u64::MAX);
    }

    /// The channel has too much in flight: it looks again later.
    pub(crate) fn postpone(&mut self, now_ns: u64) {
        self.due_ns = now_ns + GroupSessions::RENEW_NS / 20;
    }

    pub(crate) fn is_due(&self, now_ns: u64) -> bool {
        now_ns >= self.due_ns
    }

    /// A group that is to hear of its session now; it is due again later.
    pub(crate) fn take_due(&mut self, now_ns: u64) -> Option<u32> {
        let due = |session: &GroupSession| session.is_open() && now_ns >= session.renew_ns;
        let found = self.groups.iter().position(due);
        if let Some(index) = found {
            self.groups[index].renew_ns = now_ns + GroupSessions::RENEW_NS;
        } else {
            self.count_open();
        }
        Some(self.first_group + found? as u32)
    }

    pub(crate) fn deadline(&self) -> Option<u64> {
        Some(self.due_ns).filter(|due_ns| *due_ns != u64::MAX)
    }

    /// A group has as many sessions as it may have.
    pub(crate) fn warn_of_limit(&mut self, group: u32, now_ns: u64) {
        if now_ns >= self.warn_ns {
            self.warn_ns = now_ns + WARN_NS;
            log::warn!(
                "logical group {group} has {SESSIONS_MAX} sessions, the most that it may have: requests wait until one ends. Each \
                 channel of each open image is one: open fewer images, use fewer cores, or make a pool with more groups"
            );
        }
    }
}
