//! I/O queues in memory: whether they can be made and removed (Base 2.0, sections 5.5, 5.6, 5.22, 5.23).
//!
//! The transport keeps the queues; it asks here before it makes or removes one, and then sees whether
//! their memory can be reached.

use ring::Status;
use wire_nvme::Sqe;
use wire_nvme::doorbell::DoorbellBuffer;
use wire_nvme::feature::NumberOfQueues;
use wire_nvme::queue::{CreateIoCq, CreateIoSq, DeleteQueue};

use crate::{INVALID_FIELD, Limits};

/// Completion Queue Invalid: the submission queue's completion queue does not exist.
pub const COMPLETION_QUEUE_INVALID: Status = Status::new(1, 0x00).do_not_retry();
/// Invalid Interrupt Vector.
pub const INVALID_INTERRUPT_VECTOR: Status = Status::new(1, 0x08).do_not_retry();
/// Invalid Queue Deletion: submission queues still use the completion queue.
pub const INVALID_QUEUE_DELETION: Status = Status::new(1, 0x0c).do_not_retry();

/// What there is, as far as these commands have to know.
pub trait Existing {
    /// Whether there is an I/O submission queue of that identifier.
    fn has_submission(&self, qid: u16) -> bool;
    /// Whether there is an I/O completion queue of that identifier.
    fn has_completion(&self, qid: u16) -> bool;
    /// Whether a submission queue uses that completion queue.
    fn is_in_use(&self, cqid: u16) -> bool;
}

/// Whether a completion queue can be made, of as many as were `granted`.
///
/// # Errors
/// The status to complete the command with.
pub fn create_completion(
    sqe: &Sqe,
    limits: &Limits,
    granted: NumberOfQueues,
    existing: &impl Existing,
) -> Result<CreateIoCq, Status> {
    let command = CreateIoCq::of(sqe);
    identifier(command.qid, granted.completion, existing.has_completion(command.qid))?;
    size(command.entries, limits)?;
    place(command.address, command.contiguous)?;
    if command.interrupts && command.vector >= limits.interrupt_vectors {
        return Err(INVALID_INTERRUPT_VECTOR);
    }
    Ok(command)
}

/// Whether a submission queue can be made, of as many as were `granted`.
///
/// # Errors
/// The status to complete the command with.
pub fn create_submission(
    sqe: &Sqe,
    limits: &Limits,
    granted: NumberOfQueues,
    existing: &impl Existing,
) -> Result<CreateIoSq, Status> {
    let command = CreateIoSq::of(sqe);
    identifier(command.qid, granted.submission, existing.has_submission(command.qid))?;
    // 0 is the admin completion queue, which no I/O queue may use.
    if command.cqid == 0 || u32::from(command.cqid) > granted.completion {
        return Err(Status::INVALID_QUEUE_IDENTIFIER.do_not_retry());
    }
    if !existing.has_completion(command.cqid) {
        return Err(COMPLETION_QUEUE_INVALID);
    }
    size(command.entries, limits)?;
    place(command.address, command.contiguous)?;
    Ok(command)
}

/// Whether a submission queue can be removed, and which.
///
/// # Errors
/// The status to complete the command with.
pub fn delete_submission(sqe: &Sqe, existing: &impl Existing) -> Result<u16, Status> {
    let DeleteQueue { qid } = DeleteQueue::of(sqe);
    if qid == 0 || !existing.has_submission(qid) {
        return Err(Status::INVALID_QUEUE_IDENTIFIER.do_not_retry());
    }
    Ok(qid)
}

/// Whether a completion queue can be removed, and which.
///
/// # Errors
/// The status to complete the command with.
pub fn delete_completion(sqe: &Sqe, existing: &impl Existing) -> Result<u16, Status> {
    let DeleteQueue { qid } = DeleteQueue::of(sqe);
    if qid == 0 || !existing.has_completion(qid) {
        return Err(Status::INVALID_QUEUE_IDENTIFIER.do_not_retry());
    }
    if existing.is_in_use(qid) {
        return Err(INVALID_QUEUE_DELETION);
    }
    Ok(qid)
}

/// Where shadow doorbells are to lie (Base 2.0, section 5.8: Doorbell Buffer Config).
///
/// # Errors
/// The status to complete the command with.
pub fn doorbell_buffer(sqe: &Sqe) -> Result<DoorbellBuffer, Status> {
    let buffer = DoorbellBuffer::of(sqe);
    if !(buffer.shadow | buffer.events).is_multiple_of(1 << crate::limits::PAGE_LOG2) {
        return Err(INVALID_FIELD);
    }
    Ok(buffer)
}

fn identifier(qid: u16, queues_max: u32, exists: bool) -> Result<(), Status> {
    if qid == 0 || u32::from(qid) > queues_max || exists {
        return Err(Status::INVALID_QUEUE_IDENTIFIER.do_not_retry());
    }
    Ok(())
}

fn size(entries: u32, limits: &Limits) -> Result<(), Status> {
    if !(2..=limits.io_queue_entries_max).contains(&entries) {
        return Err(Status::INVALID_QUEUE_SIZE.do_not_retry());
    }
    Ok(())
}

/// CAP.CQR says that queues are contiguous; their first page is where the memory page size says that
/// pages are.
fn place(address: u64, contiguous: bool) -> Result<(), Status> {
    if !contiguous {
        return Err(INVALID_FIELD);
    }
    if !address.is_multiple_of(1 << crate::limits::PAGE_LOG2) {
        return Err(Status::PRP_OFFSET_INVALID.do_not_retry());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use wire_nvme::opcode::AdminOpcode;

    use super::*;

    /// More of one than of the other, as of queues that share a completion queue.
    const GRANTED: NumberOfQueues = NumberOfQueues { submission: 4, completion: 3 };

    /// Completion queues 1 and 2, and a submission queue 1 that uses the first.
    struct Some;

    impl Existing for Some {
        fn has_submission(&self, qid: u16) -> bool {
            qid == 1
        }

        fn has_completion(&self, qid: u16) -> bool {
            qid == 1 || qid == 2
        }

        fn is_in_use(&self, cqid: u16) -> bool {
            cqid == 1
        }
    }

    fn limits() -> Limits {
        Limits { memory_based: true, interrupt_vectors: 8, io_queue_entries_max: 256, ..Limits::default() }
    }

    #[test]
    fn completion_queues_that_can_be_made_and_those_that_cannot() {
        let good = CreateIoCq {
            address: 0x1000,
            qid: 3,
            entries: 256,
            contiguous: true,
            interrupts: true,
            vector: 7,
        };
        let create = |command: CreateIoCq| create_completion(&command.to_sqe(), &limits(), GRANTED, &Some);
        assert_eq!(create(good), Ok(good));
        let invalid = |status: Status| Err(status.do_not_retry());
        for (command, refused) in [
            (CreateIoCq { qid: 0, ..good }, invalid(Status::INVALID_QUEUE_IDENTIFIER)),
            (CreateIoCq { qid: 4, ..good }, invalid(Status::INVALID_QUEUE_IDENTIFIER)),
            (CreateIoCq { qid: 2, ..good }, invalid(Status::INVALID_QUEUE_IDENTIFIER)),
            (CreateIoCq { entries: 1, ..good }, invalid(Status::INVALID_QUEUE_SIZE)),
            (CreateIoCq { entries: 257, ..good }, invalid(Status::INVALID_QUEUE_SIZE)),
            (CreateIoCq { contiguous: false, ..good }, invalid(Status::INVALID_FIELD)),
            (CreateIoCq { address: 0x1004, ..good }, invalid(Status::PRP_OFFSET_INVALID)),
            (CreateIoCq { vector: 8, ..good }, Err(INVALID_INTERRUPT_VECTOR)),
        ] {
            assert_eq!(create(command), refused, "{command:?}");
        }
        // Without interrupts the vector has no meaning.
        let quiet = CreateIoCq { vector: 99, interrupts: false, ..good };
        assert_eq!(create(quiet), Ok(quiet));
    }

    #[test]
    fn submission_queues_that_can_be_made_and_those_that_cannot() {
        let good = CreateIoSq { address: 0x2000, qid: 2, entries: 2, contiguous: true, priority: 0, cqid: 1 };
        let create = |command: CreateIoSq| create_submission(&command.to_sqe(), &limits(), GRANTED, &Some);
        assert_eq!(create(good), Ok(good));
        assert_eq!(create(CreateIoSq { qid: 4, ..good }), Ok(CreateIoSq { qid: 4, ..good }));
        let invalid = |status: Status| Err(status.do_not_retry());
        for (command, refused) in [
            (CreateIoSq { qid: 1, ..good }, invalid(Status::INVALID_QUEUE_IDENTIFIER)),
            (CreateIoSq { qid: 0, ..good }, invalid(Status::INVALID_QUEUE_IDENTIFIER)),
            (CreateIoSq { cqid: 0, ..good }, invalid(Status::INVALID_QUEUE_IDENTIFIER)),
            (CreateIoSq { qid: 5, ..good }, invalid(Status::INVALID_QUEUE_IDENTIFIER)),
            (CreateIoSq { cqid: 4, ..good }, invalid(Status::INVALID_QUEUE_IDENTIFIER)),
            (CreateIoSq { cqid: 3, ..good }, Err(COMPLETION_QUEUE_INVALID)),
            (CreateIoSq { entries: 65536, ..good }, invalid(Status::INVALID_QUEUE_SIZE)),
            (CreateIoSq { contiguous: false, ..good }, invalid(Status::INVALID_FIELD)),
            (CreateIoSq { address: 0x2ff8, ..good }, invalid(Status::PRP_OFFSET_INVALID)),
        ] {
            assert_eq!(create(command), refused, "{command:?}");
        }
    }

    #[test]
    fn shadow_doorbells_are_whole_pages() {
        let config = |shadow, events| doorbell_buffer(&DoorbellBuffer { shadow, events }.to_sqe());
        assert_eq!(config(0x1000, 0x5000), Ok(DoorbellBuffer { shadow: 0x1000, events: 0x5000 }));
        for (shadow, events) in [(0x1004, 0x5000), (0x1000, 0x5800)] {
            assert_eq!(config(shadow, events), Err(INVALID_FIELD));
        }
    }

    #[test]
    fn queues_are_removed_submission_first() {
        let delete = |opcode, qid| DeleteQueue { qid }.to_sqe(opcode);
        let unknown = Err(Status::INVALID_QUEUE_IDENTIFIER.do_not_retry());
        for (qid, answer) in [(1, Ok(1)), (0, unknown), (2, unknown)] {
            assert_eq!(delete_submission(&delete(AdminOpcode::DeleteIoSq, qid), &Some), answer);
        }
        for (qid, answer) in [(1, Err(INVALID_QUEUE_DELETION)), (2, Ok(2)), (0, unknown), (3, unknown)] {
            assert_eq!(delete_completion(&delete(AdminOpcode::DeleteIoCq, qid), &Some), answer);
        }
    }
}
