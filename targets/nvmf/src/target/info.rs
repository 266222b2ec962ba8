//! What the management interface is told.

use std::sync::mpsc::sync_channel;

use super::{ListenAddress, Target, Uuid, send, wait};
use crate::group::{ConnectionReport, Message};
use crate::vfio_user;

/// A subsystem as it is configured.
#[derive(Clone, Debug)]
pub struct SubsystemInfo {
    /// Its name.
    pub nqn: String,
    /// Whether it is the discovery subsystem.
    pub discovery: bool,
    /// Serial number.
    pub serial_number: String,
    /// Model number.
    pub model_number: String,
    /// Every host may connect.
    pub allow_any_host: bool,
    /// Hosts that may connect.
    pub hosts: Vec<String>,
    /// Where it is reached.
    pub listeners: Vec<ListenAddress>,
    /// Its namespaces, by identifier.
    pub namespaces: Vec<NamespaceInfo>,
    /// Most namespaces.
    pub max_namespaces: u32,
    /// Smallest controller identifier.
    pub min_cntlid: u16,
    /// Largest controller identifier.
    pub max_cntlid: u16,
    /// Asymmetric namespace access is reported.
    pub ana_reporting: bool,
}

/// A namespace as it is configured.
#[derive(Clone, Debug)]
pub struct NamespaceInfo {
    /// Identifier.
    pub nsid: u32,
    /// Name of the block device.
    pub bdev_name: String,
    /// Globally unique identifier.
    pub nguid: [u8; 16],
    /// Extended unique identifier; zero for none.
    pub eui64: [u8; 8],
    /// UUID.
    pub uuid: Uuid,
    /// ANA group.
    pub anagrpid: u32,
    /// File in which reservations survive a power loss.
    pub ptpl_file: Option<String>,
    /// Size in blocks.
    pub blocks: u64,
    /// Bytes of a block.
    pub block_size: u32,
}

/// A controller, which is one host's connection to one subsystem.
#[derive(Clone, Debug)]
pub struct ControllerInfo {
    /// Controller identifier.
    pub cntlid: u16,
    /// The host's name.
    pub hostnqn: String,
    /// The host's identifier.
    pub hostid: [u8; 16],
    /// I/O queues in use.
    pub num_io_qpairs: usize,
}

/// A queue.
#[derive(Clone, Debug)]
pub struct QpairInfo {
    /// Controller identifier.
    pub cntlid: u16,
    /// Queue identifier; 0 is the admin queue.
    pub qid: u16,
    /// Index of the reactor that it is on.
    pub reactor: usize,
    /// The host's address.
    pub peer: ListenAddress,
    /// The address that the host came to.
    pub local: ListenAddress,
    /// Entries.
    pub queue_depth: u32,
    /// Commands taken.
    pub commands: u64,
    /// Commands that failed.
    pub errors: u64,
}

/// What a reactor's group holds.
#[derive(Clone, Debug, Default)]
pub struct TargetStats {
    /// For each reactor: admin queues, I/O queues and connections that are neither yet.
    pub groups: Vec<(usize, usize, usize)>,
}

impl Target {
    /// Every subsystem, the discovery subsystem first.
    pub fn subsystems(&self) -> Vec<SubsystemInfo> {
        let state = self.lock_any();
        let mut all = vec![SubsystemInfo {
            nqn: wire_nvme::fabrics::DISCOVERY_NQN.into(),
            discovery: true,
            serial_number: String::new(),
            model_number: String::new(),
            allow_any_host: true,
            hosts: Vec::new(),
            listeners: state
                .ports
                .iter()
                .filter(|port| !port.address.is_vfio_user())
                .map(|port| port.address.clone())
                .collect(),
            namespaces: Vec::new(),
            max_namespaces: 0,
            min_cntlid: 1,
            max_cntlid: 0xffef,
            ana_reporting: false,
        }];
        all.extend(state.subsystems.iter().map(|(nqn, configured)| {
            let subsystem = &configured.subsystem;
            SubsystemInfo {
                nqn: nqn.as_str().into(),
                discovery: false,
                serial_number: subsystem.serial.clone(),
                model_number: subsystem.model.clone(),
                allow_any_host: subsystem.allow_any_host,
                hosts: subsystem.hosts.iter().map(|host| host.as_str().into()).collect(),
                listeners: configured.listeners.clone(),
                namespaces: subsystem
                    .namespaces
                    .iter()
                    .map(|namespace| NamespaceInfo {
                        nsid: namespace.nsid,
                        bdev_name: namespace.bdev.clone(),
                        nguid: namespace.nguid,
                        eui64: namespace.eui64,
                        uuid: namespace.uuid,
                        anagrpid: namespace.anagrpid,
                        ptpl_file: configured.ptpl_files.get(&namespace.nsid).cloned(),
                        blocks: namespace.blocks,
                        block_size: namespace.block_size,
                    })
                    .collect(),
                max_namespaces: subsystem.namespaces_max,
                min_cntlid: subsystem.cntlid_min,
                max_cntlid: subsystem.cntlid_max,
                ana_reporting: subsystem.ana_reporting,
            }
        }));
        all
    }

    /// The controllers of a subsystem.
    pub fn controllers(&self, nqn: &str) -> Result<Vec<ControllerInfo>, crate::TargetError> {
        let nqn = super::parse_nqn(nqn)?;
        if !nqn.is_discovery() && !self.lock_any().subsystems.contains_key(&nqn) {
            return Err(super::no_subsystem(&nqn));
        }
        let controllers = self.0.directory.controllers(&nqn);
        Ok(controllers
            .iter()
            .map(|association| ControllerInfo {
                cntlid: association.cntlid(),
                hostnqn: association.hostnqn().as_str().into(),
                hostid: association.host_id(),
                num_io_qpairs: association.queues().len(),
            })
            .collect())
    }

    /// The queues of a subsystem's controllers.
    pub fn qpairs(&self, nqn: &str) -> Result<Vec<QpairInfo>, crate::TargetError> {
        let nqn = super::parse_nqn(nqn)?;
        if !nqn.is_discovery() && !self.lock_any().subsystems.contains_key(&nqn) {
            return Err(super::no_subsystem(&nqn));
        }
        let reports = self.reports()?;
        let of = |report: &&ConnectionReport| report.subnqn.as_ref() == Some(&nqn);
        let mut qpairs: Vec<QpairInfo> = reports.iter().filter(of).filter_map(qpair).collect();
        for client in self.clients()?.iter().filter(|client| client.subnqn == nqn) {
            qpairs.extend(client.queues.iter().map(|queue| queue_of(client, queue)));
        }
        Ok(qpairs)
    }

    /// How connections are spread over the reactors.
    pub fn stats(&self) -> Result<TargetStats, crate::TargetError> {
        let mut stats = TargetStats { groups: vec![(0, 0, 0); self.0.remotes.len()] };
        for report in self.reports()? {
            let Some(group) = stats.groups.get_mut(report.group) else { continue };
            match report.qid {
                Some(0) => group.0 += 1,
                Some(_) => group.1 += 1,
                None => group.2 += 1,
            }
        }
        for client in self.clients()? {
            let Some(group) = stats.groups.get_mut(client.group) else { continue };
            for (qid, ..) in client.queues {
                *(if qid == 0 { &mut group.0 } else { &mut group.1 }) += 1;
            }
        }
        Ok(stats)
    }

    /// The clients of the vfio-user transport.
    fn clients(&self) -> Result<Vec<vfio_user::Report>, crate::TargetError> {
        let state = self.lock()?;
        let mut clients = Vec::new();
        for group in state.vfio_user.iter().flat_map(|transport| &transport.groups) {
            let (answer, outcome) = sync_channel(1);
            send(group, vfio_user::Message::Report(answer))?;
            clients.extend(wait(&outcome)?);
        }
        Ok(clients)
    }

    fn reports(&self) -> Result<Vec<ConnectionReport>, crate::TargetError> {
        let state = self.lock()?;
        let mut reports = Vec::new();
        for group in state.transport.iter().flat_map(|transport| &transport.groups) {
            let (answer, outcome) = sync_channel(1);
            send(group, Message::Report(answer))?;
            reports.extend(wait(&outcome)?);
        }
        Ok(reports)
    }
}

fn queue_of(client: &vfio_user::Report, queue: &(u16, u32, u64, u64)) -> QpairInfo {
    let (qid, queue_depth, commands, errors) = *queue;
    let local = ListenAddress::vfio_user(&client.directory);
    QpairInfo {
        cntlid: client.cntlid,
        qid,
        reactor: client.group,
        peer: local.clone(),
        local,
        queue_depth,
        commands,
        errors,
    }
}

fn qpair(report: &ConnectionReport) -> Option<QpairInfo> {
    let local = ListenAddress {
        trtype: "TCP".into(),
        adrfam: if report.peer.is_ipv4() { "IPv4" } else { "IPv6" }.into(),
        traddr: report.local.traddr.clone(),
        trsvcid: report.local.trsvcid.clone(),
    };
    Some(QpairInfo {
        cntlid: report.cntlid,
        qid: report.qid?,
        reactor: report.group,
        peer: ListenAddress::from_socket(report.peer),
        local,
        queue_depth: report.entries,
        commands: report.counters.commands,
        errors: report.counters.errors,
    })
}
