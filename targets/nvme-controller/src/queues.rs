//! Validates the commands that create and delete I/O queues on memory-based transports (Base 2.0, sections
//! 5.5, 5.6, 5.22, 5.23).
//!
//! The transport owns the queues. It validates a command here, then maps the queue's memory and creates the
//! queue.

use block_io::Status;
use wire_nvme::Sqe;
use wire_nvme::doorbell::DoorbellBuffer;
use wire_nvme::feature::NumberOfQueues;
use wire_nvme::queue::{CreateIoCq, CreateIoSq, DeleteQueue};

use crate::{ControllerLimits, INVALID_FIELD};

/// Completion Queue Invalid: the submission queue's completion queue does not exist.
pub const COMPLETION_QUEUE_INVALID: Status = Status::new(1, 0x00).do_not_retry();
/// Invalid Interrupt Vector.
pub const INVALID_INTERRUPT_VECTOR: Status = Status::new(1, 0x08).do_not_retry();
/// Invalid Queue Deletion: submission queues still use the completion queue.
pub const INVALID_QUEUE_DELETION: Status = Status::new(1, 0x0c).do_not_retry();

/// The existing I/O queues of a controller, as the transport reports them.
pub trait QueueLookup {
    /// Whether this I/O submission queue exists.
    fn has_submission(&self, qid: u16) -> bool;
    /// Whether this I/O completion queue exists.
    fn has_completion(&self, qid: u16) -> bool;
    /// Whether a submission queue uses this completion queue.
    fn is_in_use(&self, cqid: u16) -> bool;
}

/// Validates Create I/O Completion Queue. `granted` is the number of queues that the host was granted.
///
/// # Errors
/// The status to complete the command with.
pub fn validate_create_io_cq(
    sqe: &Sqe,
    limits: &ControllerLimits,
    granted: NumberOfQueues,
    existing: &impl QueueLookup,
) -> Result<CreateIoCq, Status> {
    let command = CreateIoCq::from_sqe(sqe);
    check_qid(command.qid, granted.completion, existing.has_completion(command.qid))?;
    check_entries(command.entries, limits)?;
    check_address(command.address, command.contiguous)?;
    if command.interrupts && command.vector >= limits.interrupt_vectors {
        return Err(INVALID_INTERRUPT_VECTOR);
    }
    Ok(command)
}

/// Validates Create I/O Submission Queue. `granted` is the number of queues that the host was granted.
///
/// # Errors
/// The status to complete the command with.
pub fn validate_create_io_sq(
    sqe: &Sqe,
    limits: &ControllerLimits,
    granted: NumberOfQueues,
    existing: &impl QueueLookup,
) -> Result<CreateIoSq, Status> {
    let command = CreateIoSq::from_sqe(sqe);
    check_qid(command.qid, granted.submission, existing.has_submission(command.qid))?;
    // 0 is the admin completion queue, which I/O submission queues may not use.
    if command.cqid == 0 || u32::from(command.cqid) > granted.completion {
        return Err(Status::INVALID_QUEUE_IDENTIFIER.do_not_retry());
    }
    if !existing.has_completion(command.cqid) {
        return Err(COMPLETION_QUEUE_INVALID);
    }
    check_entries(command.entries, limits)?;
    check_address(command.address, command.contiguous)?;
    Ok(command)
}

/// Validates Delete I/O Submission Queue and returns the queue's identifier.
///
/// # Errors
/// The status to complete the command with.
pub fn validate_delete_io_sq(sqe: &Sqe, existing: &impl QueueLookup) -> Result<u16, Status> {
    let DeleteQueue { qid } = DeleteQueue::from_sqe(sqe);
    if qid == 0 || !existing.has_submission(qid) {
        return Err(Status::INVALID_QUEUE_IDENTIFIER.do_not_retry());
    }
    Ok(qid)
}

/// Validates Delete I/O Completion Queue and returns the queue's identifier.
///
/// # Errors
/// The status to complete the command with.
pub fn validate_delete_io_cq(sqe: &Sqe, existing: &impl QueueLookup) -> Result<u16, Status> {
    let DeleteQueue { qid } = DeleteQueue::from_sqe(sqe);
    if qid == 0 || !existing.has_completion(qid) {
        return Err(Status::INVALID_QUEUE_IDENTIFIER.do_not_retry());
    }
    if existing.is_in_use(qid) {
        return Err(INVALID_QUEUE_DELETION);
    }
    Ok(qid)
}

/// Validates Doorbell Buffer Config and returns the addresses of the shadow doorbells (Base 2.0, section
/// 5.8).
///
/// # Errors
/// The status to complete the command with.
pub fn validate_doorbell_buffer(sqe: &Sqe) -> Result<DoorbellBuffer, Status> {
    let buffer = DoorbellBuffer::from_sqe(sqe);
    if !(buffer.shadow | buffer.events).is_multiple_of(1 << crate::limits::PAGE_LOG2) {
        return Err(INVALID_FIELD);
    }
    Ok(buffer)
}

fn check_qid(qid: u16, queues_max: u32, exists: bool) -> Result<(), Status> {
    if qid == 0 || u32::from(qid) > queues_max || exists {
        return Err(Status::INVALID_QUEUE_IDENTIFIER.do_not_retry());
    }
    Ok(())
}

fn check_entries(entries: u32, limits: &ControllerLimits) -> Result<(), Status> {
    if !(2..=limits.io_queue_entries_max).contains(&entries) {
        return Err(Status::INVALID_QUEUE_SIZE.do_not_retry());
    }
    Ok(())
}

/// CAP.CQR requires physically contiguous queues, aligned to the memory page size.
fn check_address(address: u64, contiguous: bool) -> Result<(), Status> {
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

    /// More submission than completion queues, which some then share.
    const GRANTED: NumberOfQueues = NumberOfQueues { submission: 4, completion: 3 };

    /// Completion queues 1 and 2, and a submission queue 1 that uses the first.
    struct FixedQueues;

    impl QueueLookup for FixedQueues {
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

    fn limits() -> ControllerLimits {
        ControllerLimits {
            memory_based: true,
            interrupt_vectors: 8,
            io_queue_entries_max: 256,
            ..ControllerLimits::default()
        }
    }

    #[test]
    fn create_completion_queue_is_validated() {
        let good = CreateIoCq {
            address: 0x1000,
            qid: 3,
            entries: 256,
            contiguous: true,
            interrupts: true,
            vector: 7,
        };
        let create =
            |command: CreateIoCq| validate_create_io_cq(&command.to_sqe(), &limits(), GRANTED, &FixedQueues);
        assert_eq!(create(good), Ok(good));
        let invalid = |status: Status| Err(status.do_not_retry());
        for (command, expected) in [
            (CreateIoCq { qid: 0, ..good }, invalid(Status::INVALID_QUEUE_IDENTIFIER)),
            (CreateIoCq { qid: 4, ..good }, invalid(Status::INVALID_QUEUE_IDENTIFIER)),
            (CreateIoCq { qid: 2, ..good }, invalid(Status::INVALID_QUEUE_IDENTIFIER)),
            (CreateIoCq { entries: 1, ..good }, invalid(Status::INVALID_QUEUE_SIZE)),
            (CreateIoCq { entries: 257, ..good }, invalid(Status::INVALID_QUEUE_SIZE)),
            (CreateIoCq { contiguous: false, ..good }, invalid(Status::INVALID_FIELD)),
            (CreateIoCq { address: 0x1004, ..good }, invalid(Status::PRP_OFFSET_INVALID)),
            (CreateIoCq { vector: 8, ..good }, Err(INVALID_INTERRUPT_VECTOR)),
        ] {
            assert_eq!(create(command), expected, "{command:?}");
        }
        // Without interrupts the vector is ignored.
        let polled = CreateIoCq { vector: 99, interrupts: false, ..good };
        assert_eq!(create(polled), Ok(polled));
    }

    #[test]
    fn create_submission_queue_is_validated() {
        let good = CreateIoSq { address: 0x2000, qid: 2, entries: 2, contiguous: true, priority: 0, cqid: 1 };
        let create =
            |command: CreateIoSq| validate_create_io_sq(&command.to_sqe(), &limits(), GRANTED, &FixedQueues);
        assert_eq!(create(good), Ok(good));
        assert_eq!(create(CreateIoSq { qid: 4, ..good }), Ok(CreateIoSq { qid: 4, ..good }));
        let invalid = |status: Status| Err(status.do_not_retry());
        for (command, expected) in [
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
            assert_eq!(create(command), expected, "{command:?}");
        }
    }

    #[test]
    fn doorbell_buffers_must_be_page_aligned() {
        let config = |shadow, events| validate_doorbell_buffer(&DoorbellBuffer { shadow, events }.to_sqe());
        assert_eq!(config(0x1000, 0x5000), Ok(DoorbellBuffer { shadow: 0x1000, events: 0x5000 }));
        for (shadow, events) in [(0x1004, 0x5000), (0x1000, 0x5800)] {
            assert_eq!(config(shadow, events), Err(INVALID_FIELD));
        }
    }

    #[test]
    fn completion_queue_in_use_cannot_be_deleted() {
        let delete = |opcode, qid| DeleteQueue { qid }.to_sqe(opcode);
        let unknown = Err(Status::INVALID_QUEUE_IDENTIFIER.do_not_retry());
        for (qid, answer) in [(1, Ok(1)), (0, unknown), (2, unknown)] {
            assert_eq!(validate_delete_io_sq(&delete(AdminOpcode::DeleteIoSq, qid), &FixedQueues), answer);
        }
        for (qid, answer) in [(1, Err(INVALID_QUEUE_DELETION)), (2, Ok(2)), (0, unknown), (3, unknown)] {
            assert_eq!(validate_delete_io_cq(&delete(AdminOpcode::DeleteIoCq, qid), &FixedQueues), answer);
        }
    }
}
