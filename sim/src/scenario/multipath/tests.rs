//! Findings of the simulator that the scenario allows for, each on its own.

use std::cell::Cell;

use bdev::AsyncChannel;

use super::*;

/// An attached host, and a channel to its namespace.
struct AttachedHost {
    run: Run,
    channel: AsyncChannel,
    initiator: Initiator,
}

impl AttachedHost {
    fn new(seed: u64) -> AttachedHost {
        let mut run = Run::new(seed, None);
        run.start_targets();
        let (initiator, registry) = run.start_host(run.hosts[0]).unwrap();
        let core = run.world.cores(run.hosts[0])[0].clone();
        let descriptor = registry.open("Nvme0n1", Access::ReadWrite).unwrap();
        let channel = AsyncChannel::new(&core, descriptor.channel(&core).unwrap());
        AttachedHost { run, channel, initiator }
    }

    /// Starts a task on the host.
    fn spawn<T: 'static, F: Future<Output = T> + 'static>(
        &self,
        task: impl FnOnce(AsyncChannel, reactor::Core) -> F,
    ) -> Rc<Cell<Option<T>>> {
        let core = self.run.world.cores(self.run.hosts[0])[0].clone();
        let result = Rc::new(Cell::new(None));
        let (work, cell) = (task(self.channel.clone(), core.clone()), result.clone());
        assert!(core.spawn(async move { cell.set(Some(work.await)) }));
        result
    }

    /// Runs until a task has its result.
    fn wait<T>(&self, result: &Cell<Option<T>>) -> T {
        for _ in 0..10_000 {
            if let Some(value) = result.take() {
                return value;
            }
            self.run.world.run_until(self.run.world.now_ns() + MILLISECOND);
        }
        panic!("no result within ten simulated seconds");
    }

    fn write(&self, fill: u8) {
        let done = self.spawn(move |channel, core| async move {
            let mut buffer = core.pool().take(BLOCK_BYTES).unwrap();
            buffer.as_mut_slice().fill(fill);
            channel.write(0, buffer).await.is_ok()
        });
        assert!(self.wait(&done));
    }

    fn read(&self) -> u8 {
        let done = self.spawn(move |channel, core| async move {
            let buffer = core.pool().take(BLOCK_BYTES).unwrap();
            channel.read(0, buffer).await.unwrap().as_slice()[0]
        });
        self.wait(&done)
    }

    fn flush(&self) -> Rc<Cell<Option<bool>>> {
        self.spawn(move |channel, _| async move { channel.flush().await.is_ok() })
    }
}

impl Drop for AttachedHost {
    fn drop(&mut self) {
        self.initiator.stop_all();
        self.run.world.end();
    }
}

/// A target does not report that it lost its volatile cache, so a flush that is repeated after a power failure
/// succeeds although acknowledged writes from before it are gone. Only FUA and a flush that returns before the power
/// fails promise anything; the oracle knows that.
#[test]
fn a_flush_that_is_retried_after_a_power_failure_succeeds_without_the_data() {
    let mut host = AttachedHost::new(1);
    host.write(1);
    let flushed = host.flush();
    assert!(host.wait(&flushed));
    host.write(2);
    assert_eq!(host.read(), 2);
    // The flush is on its way when the power fails.
    for index in 0..TARGETS {
        host.run.world.block(host.run.hosts[0], host.run.targets[index].node, true);
    }
    let flushed = host.flush();
    host.run.world.run_until(host.run.world.now_ns() + 10 * MILLISECOND);
    (0..TARGETS).for_each(|index| host.run.crash(index));
    let loses = |seed: &u64| host.run.disk.image(host.run.disk.log_len(), *seed)[0] == 1;
    let seed = (0..100).find(loses).unwrap();
    host.run.disk.fail_power(seed);
    assert!(flushed.take().is_none(), "no target has answered");
    host.run.recover();
    assert!(host.wait(&flushed), "the retried flush succeeds");
    assert_eq!(host.read(), 1, "the acknowledged write is gone");
}

/// A path that is cut in one direction is replaced by the other one, without an error for the user.
#[test]
fn a_cut_in_either_direction_moves_io_to_the_other_path() {
    for to_target in [true, false] {
        let host = AttachedHost::new(2);
        host.write(1);
        let (from, to) = (host.run.hosts[0], host.run.targets[0].node);
        let (from, to) = if to_target { (from, to) } else { (to, from) };
        host.run.world.block(from, to, true);
        for fill in 2..20 {
            host.write(fill);
            assert_eq!(host.read(), fill);
        }
    }
}
