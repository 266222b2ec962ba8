//! The target's share of a core: what reaches its connections from elsewhere.

use std::collections::BTreeSet;
use std::sync::Arc;

use scsi::CoreEvents;
use target_shell::{Accepted, Connections, GroupWaker, Protocol};

use crate::config::IscsiConfig;
use crate::connection::IscsiConnection;
use crate::failure::IscsiViolation;
use crate::sessions::Sessions;

/// The protocol's state of a core.
pub(crate) struct IscsiCore {
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) events: Arc<CoreEvents>,
    /// Identifiers of the logical units that [`events`](Self::events) subscribes to.
    subscribed: BTreeSet<u64>,
}

impl IscsiCore {
    pub(crate) fn new(sessions: Arc<Sessions>, waker: Option<GroupWaker>) -> IscsiCore {
        let waker = waker.map(|waker| Box::new(move || waker.wake()) as Box<dyn Fn() + Send + Sync>);
        IscsiCore { sessions, events: CoreEvents::new(waker), subscribed: BTreeSet::new() }
    }
}

impl Protocol for IscsiCore {
    const NAME: &'static str = "iscsi";
    type Config = IscsiConfig;
    type Connection = IscsiConnection;
    type Error = IscsiViolation;

    fn accept(
        &mut self,
        accepted: Accepted,
        config: &Arc<IscsiConfig>,
        now_ns: u64,
    ) -> Option<IscsiConnection> {
        IscsiConnection::new(accepted, config, now_ns)
    }

    fn apply(
        &mut self,
        config: &Arc<IscsiConfig>,
        connections: &mut Connections<IscsiConnection>,
        _now_ns: u64,
    ) {
        let units = || config.nodes.iter().flat_map(|node| &node.units);
        for unit in units().filter(|unit| !self.subscribed.contains(&unit.id)) {
            unit.unit.subscribe(&self.events);
        }
        self.subscribed = units().map(|unit| unit.id).collect();
        connections.update(|_, entry| entry.connection.apply(config));
    }

    #[inline]
    fn begin_poll(&mut self, connections: &mut Connections<IscsiConnection>, _now_ns: u64) -> usize {
        let Some(functions) = self.events.take() else { return 0 };
        connections.update(|_, entry| {
            let is_closed = entry.is_closed();
            entry.connection.on_event(&functions, is_closed);
            !is_closed
        });
        1
    }
}
