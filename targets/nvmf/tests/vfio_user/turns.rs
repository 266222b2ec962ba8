//! What a client begins in a turn of its core. The clients are polled by that core too, after the target, so that what a
//! turn has completed is known exactly.

use std::sync::mpsc::SyncSender;
use std::time::Duration;

use nvmf::ListenAddress;
use reactor::{Period, PollResult, Poller, Shutdown};
use target_shell::TURN_COMMANDS_MAX;
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::sqe::Sgl;
use wire_nvme::{DataPointer, Sqe};

use crate::host::{DATA, HostQueuePair, IOVA, VfioUserTestHost, transfer};
use crate::test_target::{NQN, VfioUserTestTarget};

/// Commands in a full queue.
const DEPTH: u32 = 255;

/// A step of a test for each turn, until one returns a result.
struct Steps<F, R> {
    step: F,
    done: Option<SyncSender<R>>,
}

impl<F: FnMut() -> Option<R>, R> Poller for Steps<F, R> {
    fn name(&self) -> &str {
        "steps"
    }

    fn poll(&mut self, _now_ns: u64) -> PollResult {
        let Some(done) = &self.done else { return PollResult::from_count(0) };
        if let Some(result) = (self.step)() {
            done.send(result).unwrap();
            self.done = None;
        }
        // The core continues without a pause.
        PollResult::Busy(1)
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        Shutdown::Done
    }
}

fn run<R: Send + 'static>(rig: &VfioUserTestTarget, step: impl FnMut() -> Option<R> + Send + 'static) -> R {
    let (done, result) = std::sync::mpsc::sync_channel(1);
    let steps = Steps { step, done: Some(done) };
    rig.core().call(move |core| core.add_poller(Box::new(steps), Period::EveryTurn)).unwrap();
    result.recv_timeout(Duration::from_secs(20)).unwrap()
}

fn page(cid: u16) -> Sqe {
    Sqe { cid, ..transfer(NvmOpcode::Read, 0, 8, IOVA + DATA, 0) }
}

/// 128 KiB, which count as four commands.
fn bulk(cid: u16) -> Sqe {
    let data = DataPointer::from(Sgl::DataBlock { address: IOVA + DATA, length: 128 << 10 });
    Sqe { cid, flags: Sqe::FLAGS_SGL, data, ..transfer(NvmOpcode::Read, 0, 256, 0, 0) }
}

struct Greedy {
    host: VfioUserTestHost,
    queues: Vec<HostQueuePair>,
}

impl Greedy {
    fn new(rig: &VfioUserTestTarget, queues: u16) -> Greedy {
        let mut host = VfioUserTestHost::connect(&rig.directory);
        let queues = (1..=queues).map(|qid| host.create_queue_pair(qid, DEPTH + 1)).collect();
        Greedy { host, queues }
    }

    /// Fills its queues.
    fn fill(&mut self, read: fn(u16) -> Sqe) {
        for queue in &mut self.queues {
            (0..DEPTH as u16).for_each(|cid| self.host.push_sqe(queue, &read(cid)));
            self.host.ring_doorbell(queue);
        }
    }

    /// What each of its queues has completed since.
    fn reap(&mut self) -> Vec<u32> {
        let reap = |queue: &mut HostQueuePair| {
            let mut count = 0;
            while let Some(cqe) = self.host.poll(queue) {
                assert!(cqe.status.is_success());
                count += 1;
            }
            count
        };
        self.queues.iter_mut().map(reap).collect()
    }
}

/// What each turn has completed of each full queue, until there is no more.
fn alone(rig: &VfioUserTestTarget, mut greedy: Greedy, read: fn(u16) -> Sqe) -> Vec<Vec<u32>> {
    let mut turns = Vec::new();
    let mut is_filled = false;
    run(rig, move || {
        if !std::mem::replace(&mut is_filled, true) {
            greedy.fill(read);
            return None;
        }
        turns.push(greedy.reap());
        let total: u32 = turns.iter().flatten().sum();
        (total == DEPTH * greedy.queues.len() as u32).then(|| std::mem::take(&mut turns))
    })
}

/// It works on the completions of one half while the core works on the other.
#[test]
fn a_client_that_is_alone_has_half_of_the_commands_of_each_queue_in_a_turn() {
    let rig = VfioUserTestTarget::on_one_core();
    let halves = [128, 64, 32, 16, 15];
    assert_eq!(alone(&rig, Greedy::new(&rig, 2), page), halves.map(|count| [count, count]));
}

/// A poll has an end before that, and the queues take turns in being the first.
#[test]
fn a_poll_begins_a_limited_amount_of_data() {
    let rig = VfioUserTestTarget::on_one_core();
    let turns = alone(&rig, Greedy::new(&rig, 2), bulk);
    let first = usize::from(turns[0][0] == 0);
    for (index, turn) in turns[..4].iter().enumerate() {
        let expected = if index % 2 == first { [32, 0] } else { [0, 32] };
        assert_eq!(*turn, expected, "turn {index}");
    }
}

/// Fills a client's queue beside another client, which has a command at a time. Returns the fewest commands that were
/// completed in the turn after, of some rounds: none counts in which the other one was not active lately, because the
/// machine has paused.
fn fewest_beside_another(read: fn(u16) -> Sqe) -> u32 {
    let rig = VfioUserTestTarget::on_one_core();
    let other = rig.directory.with_extension("other");
    std::fs::create_dir(&other).unwrap();
    rig.target.add_listener(NQN, ListenAddress::vfio_user(other.to_str().unwrap())).unwrap();
    let mut greedy = Greedy::new(&rig, 1);
    let mut honest = VfioUserTestHost::connect(&other);
    let mut queue = honest.create_queue_pair(1, 16);
    let (mut rounds, mut fewest, mut done) = (0, u32::MAX, DEPTH);
    let send = move |host: &VfioUserTestHost, queue: &mut HostQueuePair| {
        host.push_sqe(queue, &page(0));
        host.ring_doorbell(queue);
    };
    send(&honest, &mut queue);
    let fewest = run(&rig, move || {
        if done < DEPTH {
            let count = greedy.reap()[0];
            fewest = if done == 0 { fewest.min(count) } else { fewest };
            done += count;
            return None;
        }
        honest.poll(&mut queue)?;
        rounds += 1;
        if rounds == 20 {
            return Some(fewest);
        }
        greedy.fill(read);
        done = 0;
        send(&honest, &mut queue);
        None
    });
    std::fs::remove_dir_all(other).unwrap();
    fewest
}

#[test]
fn beside_another_client_one_begins_a_limited_number_of_commands() {
    assert_eq!(fewest_beside_another(page), TURN_COMMANDS_MAX);
}

#[test]
fn beside_another_client_commands_count_by_their_data() {
    assert_eq!(fewest_beside_another(bulk), TURN_COMMANDS_MAX / 4);
}
