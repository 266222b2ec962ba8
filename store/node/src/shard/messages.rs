//! What other cores and the control plane ask of a shard.

use std::sync::Arc;

use block_io::Status;
use cluster_map::PartitionSize;
use dma::{Buffer, Data, Parcel, Pool};
use reactor::MailboxSender;
use replica::ObjectPart;
use wire_store::{EntryHeader, LogSector, ObjectId, Operation};

use super::replication::ReplicaInput;
use super::room::UsedSpace;
use super::scrub_state::ScrubStep;
use crate::once::{OnceSender, once};
use crate::{PartitionStatus, StoreError};

/// The way to a shard, for any thread.
#[derive(Clone)]
pub(crate) struct ShardHandle {
    pub(super) sender: MailboxSender<ShardRequest>,
    pub(super) sector: LogSector,
    pub(super) used: Arc<UsedSpace>,
    #[expect(dead_code, reason = "the shard ends when no clone is left")]
    pub(super) users: Arc<ShardUsers>,
}

/// Every handle has it. The last one closes the shard, which may sleep until then.
pub(super) struct ShardUsers(pub(super) MailboxSender<ShardRequest>);

impl Drop for ShardUsers {
    fn drop(&mut self) {
        let request = ShardRequest { operation: ShardOperation::Close, reply: Reply::Control(once().0) };
        // With a full mailbox the shard is awake, and looks at its users after each poll.
        let _ = self.0.send(request);
    }
}

/// An operation, and whom to answer.
pub(crate) struct ShardRequest {
    pub(crate) operation: ShardOperation,
    pub(crate) reply: Reply,
}

/// What a shard does.
pub(crate) enum ShardOperation {
    /// Reads at most [`TRANSFER_BYTES_MAX`](crate::TRANSFER_BYTES_MAX) bytes of an object.
    Read { object: ObjectId, offset: u32, length: u32 },
    /// Writes. The parcel has room for the entry's header, then the data, then zeroes: as many bytes as the
    /// entry has in the log ([`ShardHandle::entry_bytes`]). It is `None` once the shard has adopted it.
    Write { object: ObjectId, offset: u32, length: u32, entry: Option<Parcel> },
    /// Writes bytes of the control plane, from the start of an object.
    Put { object: ObjectId, bytes: Vec<u8> },
    /// Writes zeroes.
    WriteZeroes { object: ObjectId, offset: u32, length: u32 },
    /// Allocates every block of an object.
    Preallocate { object: ObjectId },
    /// Removes an object.
    Remove { object: ObjectId },
    /// Hands the replica something.
    Replica(Box<ReplicaInput>),
    /// Compares the part after another one with what the members of the group have.
    Scrub { after: Option<ObjectPart>, answer: OnceSender<ScrubStep> },
    /// Lists the objects of a volume.
    Objects { volume: u64 },
    /// Describes the shard.
    Describe,
    /// Writes everything in place, makes it durable, and ends.
    Close,
}

impl ShardOperation {
    /// The entry of an operation that is logged.
    pub(super) fn header(&self) -> Option<EntryHeader> {
        let (operation, object, offset, length) = match self {
            ShardOperation::Write { object, offset, length, .. } => {
                (Operation::Write, *object, *offset, *length)
            }
            ShardOperation::Put { object, bytes } => (Operation::Write, *object, 0, bytes.len() as u32),
            ShardOperation::WriteZeroes { object, offset, length } => {
                (Operation::WriteZeroes, *object, *offset, *length)
            }
            ShardOperation::Preallocate { object } => (Operation::Preallocate, *object, 0, 0),
            ShardOperation::Remove { object } => (Operation::Remove, *object, 0, 0),
            _ => return None,
        };
        let is_valid = matches!(operation, Operation::Preallocate | Operation::Remove) || length > 0;
        is_valid.then(|| EntryHeader::new(operation, object, offset, length))
    }
}

impl ShardRequest {
    /// The memory of the entry, `bytes` long; `None` if there is none now. Asked for again, it is the same.
    pub(super) fn take_entry(&mut self, pool: &Pool, bytes: usize) -> Option<Buffer> {
        let ShardOperation::Write { entry, .. } = &mut self.operation else {
            let mut buffer = pool.take(bytes)?;
            buffer.clear();
            if let ShardOperation::Put { bytes, .. } = &self.operation {
                buffer.copy_from(EntryHeader::SIZE, bytes);
            }
            return Some(buffer);
        };
        match pool.adopt(entry.take()?) {
            Ok(data) => {
                let buffer = data.into_single().expect("an entry is one buffer");
                assert_eq!(buffer.len(), bytes, "an entry has the bytes that it has in the log");
                Some(buffer)
            }
            Err(parcel) => {
                *entry = Some(parcel);
                None
            }
        }
    }
}

/// Whom a shard answers.
pub(crate) enum Reply {
    /// Nothing waits for it.
    None,
    /// A channel of a block device, with its tag.
    Channel(MailboxSender<ShardReply>, u64),
    /// The control plane.
    Control(OnceSender<ControlReply>),
}

/// The answer to a channel.
pub(crate) struct ShardReply {
    pub(crate) tag: u64,
    pub(crate) status: Status,
    /// Of a read.
    pub(crate) data: Option<Parcel>,
}

/// The answer to the control plane.
pub(crate) enum ControlReply {
    Done(Status),
    Data(Vec<u8>),
    Objects(Vec<ObjectId>),
    Description(Box<PartitionStatus>),
}

impl Reply {
    /// Answers a read, or an operation without a result.
    pub(super) fn send(self, status: Status, data: Option<Data>) {
        match self {
            Reply::None => {}
            Reply::Channel(sender, tag) => {
                // A channel takes at most as many requests as its mailbox has room for answers. If it is
                // gone, so is the caller.
                let data = data.map(Data::into_parcel);
                let _ = sender.send(ShardReply { tag, status, data });
            }
            Reply::Control(slot) => slot.send(match data {
                Some(data) => {
                    let mut bytes = vec![0; data.len()];
                    data.copy_to(0, &mut bytes);
                    ControlReply::Data(bytes)
                }
                None => ControlReply::Done(status),
            }),
        }
    }

    pub(super) fn send_objects(self, objects: Vec<ObjectId>) {
        match self {
            Reply::Control(slot) => slot.send(ControlReply::Objects(objects)),
            reply => reply.send(Status::INVALID_FIELD, None),
        }
    }

    pub(super) fn send_description(self, description: PartitionStatus) {
        match self {
            Reply::Control(slot) => slot.send(ControlReply::Description(Box::new(description))),
            reply => reply.send(Status::INVALID_FIELD, None),
        }
    }
}

impl ShardHandle {
    /// Bytes of a write's entry in the log.
    pub(crate) fn entry_bytes(&self, data_bytes: usize) -> usize {
        oplog::entry_bytes(data_bytes, self.sector) as usize
    }

    /// What it uses of its partition.
    pub(crate) fn used(&self) -> PartitionSize {
        self.used.get()
    }

    /// Sends a request; gives it back if the mailbox is full.
    pub(crate) fn send(&self, request: ShardRequest) -> Result<(), ShardRequest> {
        self.sender.send(request)
    }

    /// Asks for an operation, and waits for the answer.
    pub(crate) async fn call(&self, operation: ShardOperation) -> Result<ControlReply, StoreError> {
        let (sender, receiver) = once();
        let request = ShardRequest { operation, reply: Reply::Control(sender) };
        self.send(request).map_err(|_| StoreError::Busy)?;
        receiver.await.ok_or(StoreError::Closed)
    }

    /// As [`call`](Self::call), for an operation that succeeds or fails.
    pub(crate) async fn perform(
        &self,
        what: &'static str,
        operation: ShardOperation,
    ) -> Result<(), StoreError> {
        match self.call(operation).await? {
            ControlReply::Done(status) if status.is_success() => Ok(()),
            ControlReply::Done(status) => Err(StoreError::Failed { what, status }),
            _ => Err(StoreError::Closed),
        }
    }
}
