//! Arbitrary bytes as the commands of several nexuses, whose tasks overlap: the fuzz entry.

use block_io::{Status, Tag};
use wire_scsi::copy::CopySegment;
use wire_scsi::{CommandBits, ScsiStatus};

use crate::test_unit::{TestUnit, config, copy_target};
use crate::{
    Command, DataIn, Residual, Response, Step, Task, TaskContext, TaskEvent, UnitConfig, UnitFunction,
    absent_unit, no_waker,
};

/// Bytes, and zeroes when they are used up.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut taken = [0; N];
        let (head, rest) = self.0.split_at(N.min(self.0.len()));
        taken[..head.len()].copy_from_slice(head);
        self.0 = rest;
        taken
    }
}

/// A command in flight.
struct Pending {
    task: Task,
    step: Option<Step>,
    nexus: usize,
    completions: Vec<bdev::Completion>,
    data_out_bytes: u32,
    data_in_bytes: u32,
    has_answer: bool,
    is_aborted: bool,
    is_copy: bool,
}

/// The parameter list of an EXTENDED COPY from one of the units to one of them, or to none.
fn copy_list(test: &TestUnit, how: u8) -> Vec<u8> {
    let mut list = vec![how, 0, 0, 64, 0, 0, 0, 0, 0, 0, 0, 56, 0, 0, 0, 0];
    list.extend(copy_target(&test.unit));
    list.extend(test.peers.peers.iter().flat_map(|peer| copy_target(peer.nexus.unit())));
    for turned in [how, how.rotate_left(3)] {
        let [source, destination] = [turned >> 1 & 1, turned >> 2 & 1].map(u16::from);
        let (blocks, source_lba) = ((turned >> 3).into(), (turned & 0x3f).into());
        let segment = CopySegment { source, destination, blocks, source_lba, destination_lba: 20 };
        list.extend(segment.encode());
    }
    debug_assert_eq!(list.len(), 136);
    list
}

/// A CDB: any, or of a known command, with only bits that mean something.
fn cdb(bytes: &mut Bytes<'_>) -> Vec<u8> {
    let [kind, which] = bytes.take();
    let any: [u8; 16] = bytes.take();
    if kind & 3 == 0 {
        return any[..(which % 17).into()].to_vec();
    }
    if kind >= 0xf0 {
        // A copy whose list has the length of `copy_list`, which is found by chance too rarely.
        return vec![0x83, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 136, 0, 0];
    }
    let command = &CommandBits::ALL[usize::from(which) % CommandBits::ALL.len()];
    let mut cdb: Vec<u8> = command.usage.iter().zip(any).map(|(usage, any)| usage & any).collect();
    cdb[0] = command.opcode;
    if let Some(action) = command.action {
        cdb[1] = cdb[1] & 0xe0 | action;
    }
    // The high bytes of addresses and lengths are usually 0, so that blocks are on the unit.
    if kind & 3 != 1 {
        match cdb.len() {
            10 => cdb[2..5].fill(0),
            12 => [2, 3, 4, 6, 7].into_iter().for_each(|at| cdb[at] = 0),
            16 => [2, 3, 4, 5, 6, 7, 8, 10, 11].into_iter().for_each(|at| cdb[at] = 0),
            _ => {}
        }
        if command.opcode != 0x12 {
            *cdb.last_mut().unwrap_or(&mut 0) = 0;
        }
    }
    cdb
}

fn check_response(response: &Response, data_out_bytes: u32, data_in_bytes: u32) {
    let is_check = response.status == ScsiStatus::CheckCondition;
    assert_eq!(is_check, response.sense.is_some());
    assert_eq!(is_check, !response.sense_bytes().is_empty());
    assert!(response.data.len() <= data_in_bytes);
    if let DataIn::Data(data, valid) = &response.data {
        assert!(*valid as usize <= data.len());
    }
    match response.residual {
        Residual::Underflow(bytes) => assert!(bytes > 0 && bytes <= data_in_bytes.max(data_out_bytes)),
        Residual::Overflow(bytes) => assert!(bytes > 0),
        Residual::None => {}
    }
}

/// Executes what bytes say. Every command is answered once unless it is aborted, and nothing exceeds its bounds.
pub fn any_bytes(bytes: &[u8]) {
    let mut bytes = Bytes(bytes);
    let [features] = bytes.take();
    let mut test = TestUnit::new(UnitConfig {
        read_only: features & 7 == 7,
        can_unmap: features & 8 == 0,
        can_write_zeroes: features & 16 == 0,
        ..config(if features & 32 == 0 { 512 } else { 4096 }, 64)
    });
    let other = UnitConfig {
        uuid: bdev::Uuid::from_bytes(*b"another device.."),
        ..config(if features & 64 == 0 { test.unit.block_bytes() } else { 512 }, 64)
    };
    test.add_peer(TestUnit::new(other));
    let nexuses = [1, 2, 3].map(|initiator| crate::test_unit::nexus(&test.unit, initiator));
    let mut pending: Vec<Pending> = Vec::new();
    while !bytes.0.is_empty() {
        let [choice, who, out_blocks, in_blocks] = bytes.take();
        let nexus = &nexuses[usize::from(who) % nexuses.len()];
        match choice % 8 {
            0 => {
                test.unit.resize(32 + u64::from(who % 32));
            }
            1 => {
                let functions =
                    [UnitFunction::AbortTaskSet, UnitFunction::ClearTaskSet, UnitFunction::LogicalUnitReset];
                let function = functions[usize::from(who) % functions.len()];
                assert!(test.unit.manage(function, nexus, no_waker()).outcome().is_some());
            }
            2 => test.disk.failure = Some(Status::new(out_blocks & 7, in_blocks)),
            3 | 4 if !pending.is_empty() => {
                let at = usize::from(who) % pending.len();
                let one = &mut pending[at];
                if advance(one, &nexuses[one.nexus], &mut test, out_blocks) {
                    pending.swap_remove(at);
                }
            }
            _ if pending.len() < 4 => {
                let cdb = cdb(&mut bytes);
                // Lengths around multiples of blocks, in one direction.
                let length =
                    |blocks: u8| (u32::from(blocks & 0x1f) * 512 + u32::from(blocks >> 5)).saturating_sub(2);
                let (data_out_bytes, data_in_bytes) =
                    if choice & 0x80 == 0 { (length(out_blocks), 0) } else { (0, length(in_blocks)) };
                let command =
                    Command { cdb: &cdb, data_out_bytes, data_in_bytes, tag: Tag(9), ..Command::default() };
                check_response(&absent_unit(&command, &[3]), data_out_bytes, data_in_bytes);
                if choice & 0x40 == 0 {
                    nexus.take_attention();
                }
                let waker = no_waker();
                let mut requests = Vec::new();
                let mut context = TaskContext {
                    nexus,
                    luns: &[0, 7],
                    waker: &waker,
                    requests: &mut requests,
                    peers: &mut test.peers,
                };
                let (task, step) = Task::start(&command, &mut context);
                let completions = execute(&mut test, &mut requests);
                let nexus = usize::from(who) % nexuses.len();
                pending.push(Pending {
                    task,
                    step: Some(step),
                    nexus,
                    completions,
                    data_out_bytes,
                    data_in_bytes,
                    has_answer: false,
                    is_aborted: false,
                    is_copy: cdb.first() == Some(&0x83),
                });
            }
            _ => {}
        }
    }
    for mut one in pending {
        let nexus = &nexuses[one.nexus];
        let steps_max = 100_000;
        assert!((0..steps_max).any(|_| advance(&mut one, nexus, &mut test, 0)), "a task does not end");
    }
}

/// Checks requests as the block layer's callers must make them, and executes them.
fn execute(test: &mut TestUnit, requests: &mut Vec<bdev::Request>) -> Vec<bdev::Completion> {
    for request in requests.iter() {
        assert_eq!(request.tag, Tag(9));
        assert!(!request.op.has_range() || request.blocks > 0);
        let bytes = u64::from(request.blocks) * u64::from(test.unit.block_bytes());
        assert!(request.data().is_none_or(|data| data.len() as u64 == bytes));
        assert_eq!(request.op.has_data(), request.data().is_some());
    }
    let mut completions = test.disk.execute(requests);
    completions.extend(test.peers.take_completions(Tag(9)));
    completions
}

/// Takes the next step of a task, which `how` may abort or starve. Returns whether it has ended.
fn advance(one: &mut Pending, nexus: &crate::UnitNexus, test: &mut TestUnit, how: u8) -> bool {
    let Some(step) = one.step.take() else { return true };
    let starves = how & 0xf0 == 0xf0;
    let aborts = how & 0x0f == 0x0f;
    let memory = |bytes: u32| test.pool.take(bytes as usize).map(dma::Data::from);
    let event = match step {
        Step::Done(response) => {
            assert!(!one.has_answer && !one.is_aborted && !one.task.is_in_flight());
            check_response(&response, one.data_out_bytes, one.data_in_bytes);
            return true;
        }
        Step::Aborted => {
            assert!((one.has_answer || one.is_aborted) && !one.task.is_in_flight());
            return true;
        }
        _ if aborts => TaskEvent::Abort,
        Step::DataOut(bytes) => {
            assert!(bytes > 0 && bytes <= one.data_out_bytes);
            let mut pattern: Vec<u8> = (0..bytes).map(|at| (at as u8).wrapping_mul(how)).collect();
            if one.is_copy && how & 1 == 0 {
                pattern.iter_mut().zip(copy_list(test, how)).for_each(|(byte, of_list)| *byte = of_list);
            }
            TaskEvent::DataOut(test.sliced(&pattern))
        }
        Step::DataIn(_) | Step::Memory(_) if starves => TaskEvent::NoMemory,
        Step::DataIn(bytes) => memory(bytes).map_or(TaskEvent::NoMemory, TaskEvent::DataIn),
        Step::Memory(bytes) => memory(bytes).map_or(TaskEvent::NoMemory, TaskEvent::Memory),
        Step::Pending => {
            if how & 1 == 0 {
                test.sanitize();
            }
            TaskEvent::Changed
        }
        Step::InFlight => TaskEvent::Completed(one.completions.remove(0)),
        Step::Respond(response) => {
            assert!(!one.has_answer);
            check_response(&response, one.data_out_bytes, one.data_in_bytes);
            one.has_answer = true;
            TaskEvent::Completed(one.completions.remove(0))
        }
    };
    one.is_aborted |= matches!(event, TaskEvent::Abort);
    let waker = no_waker();
    let mut requests = Vec::new();
    let mut context =
        TaskContext { nexus, luns: &[0, 7], waker: &waker, requests: &mut requests, peers: &mut test.peers };
    one.step = Some(one.task.resume(event, &mut context));
    one.completions.extend(execute(test, &mut requests));
    false
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_commands_of_several_nexuses_are_answered_once(
            bytes in prop::collection::vec(any::<u8>(), 0..600),
        ) {
            super::any_bytes(&bytes);
        }
    }
}
