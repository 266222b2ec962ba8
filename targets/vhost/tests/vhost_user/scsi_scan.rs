//! Task management functions while more commands are available than a device fetches at a time.

use wire_virtio::Features;
use wire_virtio::scsi::{CommandHeader, RESPONSE_BYTES, ResponseHeader, TaskFunction};

use crate::frontend::{Driver, wait_until};
use crate::scsi::{COMMANDS, DATA, READ, connect, greet, lun, manage, start, transfer};

/// Queues with their areas: three are on the connection's core, one is on the other.
const QUEUES: [(u8, u64); 4] = [(2, 0), (3, 32 << 10), (4, 128 << 10), (6, 160 << 10)];
const CONTROL: u64 = 64 << 10;
const QUEUE_SIZE: u16 = 512;
/// Those of three queues are more than a core has in flight.
const COMMANDS_PER_QUEUE: u64 = 400;
const COMMAND_BYTES: u64 = 256;
const ABORTED: u8 = 2;

/// Makes a read of one descriptor available.
fn add_read(queue: &mut Driver<'_>, number: u64) {
    let at = COMMANDS + number * COMMAND_BYTES;
    let header = CommandHeader { lun: lun(0), tag: number, attribute: 0, priority: 0, reference_number: 0 };
    let mut bytes = [&header.to_bytes()[..], &transfer(READ, 0, 1)].concat();
    bytes.resize(51, 0);
    queue.memory().write(at, &bytes);
    queue.memory().write(at + 64, &[0xff; RESPONSE_BYTES]);
    let parts = [(at, 51, false), (at + 64, RESPONSE_BYTES as u32, true), (DATA + 8192, 512, true)];
    queue.add_indirect(at + 176, &parts);
}

fn response(queue: &Driver<'_>, number: u64) -> u8 {
    let bytes: [u8; RESPONSE_BYTES] = queue.memory().snapshot(COMMANDS + number * COMMAND_BYTES + 64);
    ResponseHeader::decode(&bytes).unwrap().response
}

#[test]
fn functions_reach_all_commands_that_were_available_before() {
    for ring in [Features::empty(), Features::RING_PACKED] {
        let target = start(&format!("scan-{}", ring.bits()), &["Slow0"]);
        let frontend = connect(&target, ring | Features::INDIRECT_DESC);
        let mut functions = frontend.start_queue(0, 32, CONTROL);
        let mut queues = QUEUES.map(|(index, offset)| frontend.start_queue(index, QUEUE_SIZE, offset));
        greet(&mut queues[0], 0);
        for function in [TaskFunction::AbortTaskSet, TaskFunction::ClearTaskSet] {
            wait_until("the device asks for notifications", || {
                queues.iter().all(|queue| queue.wants_notification(0))
            });
            for (first, queue) in (0..).step_by(COMMANDS_PER_QUEUE as usize).zip(&mut queues) {
                (first..first + COMMANDS_PER_QUEUE).for_each(|number| add_read(queue, number));
            }
            assert_eq!(manage(&mut functions, function, 0), 0);
            for (first, queue) in (0..).step_by(COMMANDS_PER_QUEUE as usize).zip(&mut queues) {
                for number in first..first + COMMANDS_PER_QUEUE {
                    assert!(queue.try_used(1).is_some(), "{ring:?}: command {number} has not ended");
                }
                let numbers = first..first + COMMANDS_PER_QUEUE;
                let aborted = numbers.filter(|number| response(queue, *number) == ABORTED).count();
                assert_eq!(aborted as u64, COMMANDS_PER_QUEUE, "{ring:?}: the others were executed");
            }
            // The task set is empty.
            assert_eq!(manage(&mut functions, TaskFunction::QueryTaskSet, 0), 0);
        }
    }
}

#[test]
fn a_query_finds_a_command_behind_many_others() {
    let target = start("scan-query", &["Slow0"]);
    let frontend = connect(&target, Features::INDIRECT_DESC);
    let mut functions = frontend.start_queue(0, 32, CONTROL);
    let mut queue = frontend.start_queue(3, QUEUE_SIZE, 32 << 10);
    greet(&mut queue, 0);
    wait_until("the device asks for notifications", || queue.wants_notification(0));
    (0..COMMANDS_PER_QUEUE).for_each(|number| add_read(&mut queue, number));
    let last = COMMANDS_PER_QUEUE - 1;
    assert_eq!(manage(&mut functions, TaskFunction::QueryTask, last), 10, "FUNCTION SUCCEEDED");
    assert_eq!(manage(&mut functions, TaskFunction::QueryTask, COMMANDS_PER_QUEUE), 0, "another tag");
}
