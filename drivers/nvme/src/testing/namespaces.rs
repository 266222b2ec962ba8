//! Namespace Management and Namespace Attachment (Base 2.0, sections 5.22 and 5.23) of the simulated controller.

use block_io::Status;
use wire_nvme::identify::{self, ControllerList, IdentifyNamespace, LbaFormat, NamespaceList};
use wire_nvme::manage::{NamespaceAttachment, NewNamespace};
use wire_nvme::{NSID_ALL, Sqe};

use super::commands::{CommandOutcome, complete_with};
use super::{NamespaceStore, SimulatedState};

/// Invalid Format: no LBA format has that index.
const INVALID_FORMAT: Status = Status::new(1, 0x0a).do_not_retry();
/// Namespace Insufficient Capacity.
const INSUFFICIENT_CAPACITY: Status = Status::new(1, 0x15).do_not_retry();
/// Namespace Identifier Unavailable.
const IDENTIFIER_UNAVAILABLE: Status = Status::new(1, 0x16).do_not_retry();
/// Namespace Already Attached.
const ALREADY_ATTACHED: Status = Status::new(1, 0x18).do_not_retry();
/// Namespace Not Attached.
const NOT_ATTACHED: Status = Status::new(1, 0x1a).do_not_retry();
/// Thin Provisioning Not Supported.
const THIN_PROVISIONING: Status = Status::new(1, 0x1b).do_not_retry();
/// Controller List Invalid.
const CONTROLLER_LIST_INVALID: Status = Status::new(1, 0x1c).do_not_retry();
/// I/O Command Set Not Supported.
const COMMAND_SET: Status = Status::new(1, 0x29).do_not_retry();

const INVALID_NAMESPACE: Status = Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry();

/// Capacity that a namespace uses, in bytes.
fn bytes_of(namespace: &IdentifyNamespace) -> u128 {
    let format = namespace.formats.get(usize::from(namespace.format));
    format.map_or(0, |format| block_bytes(format) * u128::from(namespace.nsze))
}

fn block_bytes(format: &LbaFormat) -> u128 {
    (1 << format.data_log2) + u128::from(format.metadata_bytes)
}

impl SimulatedState {
    /// Unallocated capacity (UNVMCAP) in bytes.
    pub(super) fn unallocated(&self) -> u128 {
        let taken: u128 = self.config.namespaces.iter().map(bytes_of).sum();
        self.config.identity.tnvmcap.saturating_sub(taken)
    }

    fn exists(&self, nsid: u32) -> bool {
        let index = (nsid as usize).wrapping_sub(1);
        self.config.namespaces.get(index).is_some_and(|namespace| namespace.nsze > 0)
    }

    /// Allocated namespaces, attached or not.
    pub(super) fn allocated(&self) -> impl Iterator<Item = u32> {
        (1..=self.config.namespaces.len() as u32).filter(|nsid| self.exists(*nsid))
    }

    /// Identify of allocated namespaces and of controllers (CNS 10h to 13h); `None` for other CNS values.
    pub(super) fn identify_allocated(
        &self,
        cns: u8,
        sqe: &Sqe,
        page: &mut [u8; identify::SIZE],
    ) -> Option<Status> {
        let own = self.config.identity.cntlid;
        // Controller lists start at CNTID in CDW10.
        let from = (sqe.cdw10 >> 16) as u16;
        match cns {
            0x10 if sqe.nsid >= NSID_ALL - 1 => return Some(INVALID_NAMESPACE),
            0x10 => NamespaceList(self.allocated().filter(|nsid| *nsid > sqe.nsid).collect()).encode(page),
            0x11 if sqe.nsid == 0 || sqe.nsid > self.config.identity.nn => return Some(INVALID_NAMESPACE),
            0x11 => {
                if self.exists(sqe.nsid) {
                    self.config.namespaces[sqe.nsid as usize - 1].encode(page);
                }
            }
            0x12 if !self.exists(sqe.nsid) => return Some(INVALID_NAMESPACE),
            0x12 => {
                let attached = self.attached.contains(&sqe.nsid) && own >= from;
                ControllerList(attached.then_some(own).into_iter().collect()).encode(page);
            }
            0x13 => ControllerList((own >= from).then_some(own).into_iter().collect()).encode(page),
            _ => return None,
        }
        Some(Status::SUCCESS)
    }

    /// Executes Namespace Management: create or delete.
    pub(super) fn manage(&mut self, sqe: &Sqe) -> CommandOutcome {
        match sqe.cdw10 & 0xf {
            0 => match self.create(sqe) {
                Ok(nsid) => Some((Status::SUCCESS, nsid.into())),
                Err(status) => complete_with(status),
            },
            1 => complete_with(self.delete(sqe.nsid)),
            _ => complete_with(Status::INVALID_FIELD.do_not_retry()),
        }
    }

    fn create(&mut self, sqe: &Sqe) -> Result<u32, Status> {
        if sqe.cdw11 >> 24 != 0 {
            return Err(COMMAND_SET);
        }
        let mut data = [0; identify::SIZE];
        self.read_data(sqe, &mut data)?;
        let new = NewNamespace::decode(&data);
        let formats = self.formats.clone();
        let format = *formats.get(usize::from(new.format)).ok_or(INVALID_FORMAT)?;
        if new.nsze == 0 || new.ncap > new.nsze {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        if new.ncap < new.nsze {
            return Err(THIN_PROVISIONING);
        }
        let bytes = block_bytes(&format) * u128::from(new.nsze);
        if bytes > self.unallocated() {
            return Err(INSUFFICIENT_CAPACITY);
        }
        let free = (1..=self.config.identity.nn).find(|nsid| !self.exists(*nsid));
        let nsid = free.ok_or(IDENTIFIER_UNAVAILABLE)?;
        let namespace = IdentifyNamespace {
            nsze: new.nsze,
            ncap: new.ncap,
            nuse: new.nsze,
            formats,
            format: new.format,
            extended_lba: new.extended_lba,
            dps: new.dps,
            nmic: new.nmic,
            nvmcap: bytes,
            ..IdentifyNamespace::default()
        };
        let index = nsid as usize - 1;
        while self.config.namespaces.len() <= index {
            // Lower identifiers may be unallocated too.
            let none = IdentifyNamespace { nsze: 0, ..namespace.clone() };
            self.stores.push(NamespaceStore::new(&none));
            self.config.namespaces.push(none);
        }
        self.stores[index] = NamespaceStore::new(&namespace);
        self.config.namespaces[index] = namespace;
        Ok(nsid)
    }

    fn delete(&mut self, nsid: u32) -> Status {
        let which: Vec<u32> = match nsid {
            NSID_ALL => self.allocated().collect(),
            nsid if self.exists(nsid) => vec![nsid],
            _ => return INVALID_NAMESPACE,
        };
        for nsid in which {
            let index = nsid as usize - 1;
            let namespace = &mut self.config.namespaces[index];
            (namespace.nsze, namespace.ncap, namespace.nuse) = (0, 0, 0);
            self.stores[index] = NamespaceStore::new(namespace);
            if self.attached.remove(&nsid) {
                self.namespace_changed(nsid);
            }
        }
        Status::SUCCESS
    }

    /// Executes Namespace Attachment: attach or detach.
    pub(super) fn attachment(&mut self, sqe: &Sqe) -> Status {
        let Some(NamespaceAttachment { attach }) = NamespaceAttachment::from_sqe(sqe) else {
            return Status::INVALID_FIELD.do_not_retry();
        };
        if !self.exists(sqe.nsid) {
            return INVALID_NAMESPACE;
        }
        let mut data = [0; identify::SIZE];
        if let Err(status) = self.read_data(sqe, &mut data) {
            return status;
        }
        match ControllerList::decode(&data) {
            // This is the only controller.
            Ok(list) if list.0 == [self.config.identity.cntlid] => {}
            _ => return CONTROLLER_LIST_INVALID,
        }
        match (attach, self.attached.contains(&sqe.nsid)) {
            (true, true) => return ALREADY_ATTACHED,
            (false, false) => return NOT_ATTACHED,
            (true, false) => _ = self.attached.insert(sqe.nsid),
            (false, true) => _ = self.attached.remove(&sqe.nsid),
        }
        self.namespace_changed(sqe.nsid);
        Status::SUCCESS
    }
}
