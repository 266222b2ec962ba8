//! For whom requests are: tenants, by the same name on every core.
//!
//! A connection has a [`Flow`], whose number ([`block_io::Request::flow`]) no other connection of the process
//! has. Each flow belongs to a tenant, which the connection's target names: at first by what is known of the
//! peer, and after a login by what the peer has logged in as. The flows of one tenant may be on any core.
//! [`Scheduler`]s find the tenant of a request by one load.
//!
//! [`Scheduler`]: crate::Scheduler

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// The number of flows, and of tenants: what a request's field can name.
const COUNT: usize = 1 << 16;

/// A tenant, on every core, from its first flow to the end of its last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(u16);

impl TenantId {
    /// The process itself, with flow 0: examination, rebuilding, and whatever no connection has asked for.
    pub const SELF: TenantId = TenantId(0);

    pub(crate) const fn of_index(index: u16) -> TenantId {
        TenantId(index)
    }

    /// An index, counted from 0.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The tenants of a process, one table a [`Registry`](crate::Registry). Cheap to clone.
///
/// Connections begin and end under a lock; the way of an I/O reads one word.
#[derive(Clone, Default)]
pub struct Tenants(Arc<TenantTable>);

struct TenantTable {
    of_flow: Box<[AtomicU16]>,
    names: Mutex<TenantNames>,
}

/// Numbers that were returned are used again last, so that one that a core still remembers is not soon
/// another's.
struct TenantNames {
    by_name: HashMap<Arc<str>, TenantId>,
    tenants: Vec<Option<NamedTenant>>,
    free_tenants: VecDeque<u16>,
    /// Flows from this one on were never used.
    first_unused: usize,
    free_flows: VecDeque<u16>,
}

struct NamedTenant {
    name: Arc<str>,
    flows: u32,
}

/// A tenant, for reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantInfo {
    /// Its identifier.
    pub id: TenantId,
    /// Its name.
    pub name: String,
    /// Its flows at present.
    pub flows: u32,
}

/// The requests of one connection, until it is dropped: after the connection's last request has completed.
pub struct Flow {
    id: u16,
    tenants: Tenants,
}

impl Default for TenantTable {
    fn default() -> TenantTable {
        let own = NamedTenant { name: "ringbolt".into(), flows: 1 };
        let names = TenantNames {
            by_name: HashMap::new(),
            tenants: vec![Some(own)],
            free_tenants: VecDeque::new(),
            first_unused: 1,
            free_flows: VecDeque::new(),
        };
        let of_flow = (0..COUNT).map(|_| AtomicU16::new(0)).collect();
        TenantTable { of_flow, names: Mutex::new(names) }
    }
}

impl Tenants {
    /// The tenant of a flow.
    #[inline]
    pub fn of_flow(&self, flow: u16) -> TenantId {
        TenantId(self.0.of_flow[usize::from(flow)].load(Ordering::Relaxed))
    }

    /// A flow of the tenant with this name, which begins with its first. Beyond 65,535 flows at a time,
    /// further ones are flow 0: they share what is the process's own.
    pub fn connect(&self, tenant: &str) -> Flow {
        let mut names = self.lock();
        let id = if names.first_unused < COUNT {
            names.first_unused += 1;
            (names.first_unused - 1) as u16
        } else {
            let Some(id) = names.free_flows.pop_front() else { return Flow { id: 0, tenants: self.clone() } };
            id
        };
        let tenant = names.add_flow(tenant);
        self.0.of_flow[usize::from(id)].store(tenant.0, Ordering::Relaxed);
        drop(names);
        Flow { id, tenants: self.clone() }
    }

    /// The tenants that have flows at present, that of the process first.
    pub fn list(&self) -> Vec<TenantInfo> {
        let names = self.lock();
        let tenants = names.tenants.iter().enumerate().filter_map(|(id, tenant)| {
            let NamedTenant { name, flows } = tenant.as_ref()?;
            Some(TenantInfo { id: TenantId(id as u16), name: name.to_string(), flows: *flows })
        });
        tenants.collect()
    }

    /// The name of a tenant, if it has flows at present.
    pub fn name(&self, tenant: TenantId) -> Option<String> {
        let names = self.lock();
        names.tenants.get(tenant.index())?.as_ref().map(|tenant| tenant.name.to_string())
    }

    fn lock(&self) -> MutexGuard<'_, TenantNames> {
        // Nothing panics under the lock half-way through a change.
        sync::lock(&self.0.names)
    }
}

impl TenantNames {
    fn add_flow(&mut self, name: &str) -> TenantId {
        if let Some(id) = self.by_name.get(name).copied()
            && let Some(tenant) = &mut self.tenants[id.index()]
        {
            tenant.flows += 1;
            return id;
        }
        let name: Arc<str> = name.into();
        let tenant = Some(NamedTenant { name: name.clone(), flows: 1 });
        let id = if self.tenants.len() < COUNT {
            self.tenants.push(tenant);
            TenantId((self.tenants.len() - 1) as u16)
        } else {
            // There are no more tenants than flows, so one is free.
            let Some(id) = self.free_tenants.pop_front() else { return TenantId::SELF };
            self.tenants[usize::from(id)] = tenant;
            TenantId(id)
        };
        self.by_name.insert(name, id);
        id
    }

    fn remove_flow(&mut self, id: TenantId) {
        let Some(tenant) = &mut self.tenants[id.index()] else { return };
        tenant.flows -= 1;
        if tenant.flows == 0 && id != TenantId::SELF {
            self.by_name.remove(&tenant.name);
            self.tenants[id.index()] = None;
            self.free_tenants.push_back(id.0);
        }
    }
}

impl Flow {
    /// The number in [`block_io::Request::flow`].
    pub fn id(&self) -> u16 {
        self.id
    }

    /// Its tenant.
    pub fn tenant(&self) -> TenantId {
        self.tenants.of_flow(self.id)
    }

    /// Names its tenant anew, as after a login. Requests that are queued stay where they are.
    pub fn set_tenant(&self, name: &str) {
        if self.id == 0 {
            return;
        }
        let mut names = self.tenants.lock();
        // The new one first, as the two may be the same.
        let tenant = names.add_flow(name);
        names.remove_flow(self.tenant());
        self.tenants.0.of_flow[usize::from(self.id)].store(tenant.0, Ordering::Relaxed);
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        if self.id == 0 {
            return;
        }
        let mut names = self.tenants.lock();
        names.remove_flow(self.tenant());
        self.tenants.0.of_flow[usize::from(self.id)].store(TenantId::SELF.0, Ordering::Relaxed);
        names.free_flows.push_back(self.id);
    }
}

impl fmt::Debug for Tenants {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_list().entries(self.list()).finish()
    }
}

impl fmt::Debug for Flow {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Flow({}, of {:?})", self.id, self.tenant())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(tenants: &Tenants) -> Vec<(String, u32)> {
        tenants.list().into_iter().skip(1).map(|one| (one.name, one.flows)).collect()
    }

    #[test]
    fn connections_of_one_name_are_one_tenant_wherever_they_are() {
        let tenants = Tenants::default();
        let first = tenants.connect("nqn.host");
        let elsewhere = tenants.clone();
        let second = std::thread::spawn(move || elsewhere.connect("nqn.host")).join().unwrap();
        let other = tenants.connect("nqn.other");
        assert_eq!(first.tenant(), second.tenant());
        assert_ne!(first.id(), second.id());
        assert_ne!(first.tenant(), other.tenant());
        assert_eq!(tenants.of_flow(0), TenantId::SELF);
        assert_eq!(listed(&tenants), [("nqn.host".to_string(), 2), ("nqn.other".to_string(), 1)]);
        drop((first, other));
        assert_eq!(listed(&tenants), [("nqn.host".to_string(), 1)]);
    }

    #[test]
    fn a_login_moves_a_flow_to_its_tenant() {
        let tenants = Tenants::default();
        let (one, two) = (tenants.connect("10.0.0.1"), tenants.connect("10.0.0.1"));
        one.set_tenant("nqn.host");
        assert_ne!(one.tenant(), two.tenant());
        assert_eq!(tenants.of_flow(one.id()), one.tenant());
        one.set_tenant("nqn.host");
        two.set_tenant("nqn.host");
        assert_eq!(listed(&tenants), [("nqn.host".to_string(), 2)]);
    }

    #[test]
    fn numbers_are_used_again_last_and_beyond_all_flows_are_the_process_itself() {
        let tenants = Tenants::default();
        let first = tenants.connect("a");
        let (flow, tenant) = (first.id(), first.tenant());
        drop(first);
        let others: Vec<Flow> = (0..COUNT - 2).map(|_| tenants.connect("b")).collect();
        assert!(others.iter().all(|one| one.id() != flow && one.tenant() != tenant));
        let again = tenants.connect("c");
        assert_eq!(again.id(), flow);
        let beyond = tenants.connect("d");
        assert_eq!((beyond.id(), beyond.tenant()), (0, TenantId::SELF));
        beyond.set_tenant("e");
        assert_eq!(beyond.tenant(), TenantId::SELF);
    }
}
