//! Tests of the subsystem and of its thread.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use super::*;
use crate::{BalancedTarget, ConnectionLoad, ConnectionMove, ControlPlane, ManagedReactor};

/// Long, for a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// A target on two reactors whose connections are all on the first.
struct FakeTarget {
    asked: SyncSender<()>,
    moves: SyncSender<Vec<ConnectionMove>>,
}

impl BalancedTarget for FakeTarget {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn reactors(&self) -> Vec<usize> {
        vec![0, 1]
    }

    fn loads(&self) -> Option<Vec<Vec<ConnectionLoad>>> {
        _ = self.asked.try_send(());
        let load = |id| ConnectionLoad { id, work: 1, is_movable: true, can_begin: true };
        Some(vec![vec![load(1), load(2)], Vec::new()])
    }

    fn move_connections(&self, moves: &[ConnectionMove]) {
        _ = self.moves.try_send(moves.to_vec());
    }
}

struct FakeModule(Arc<FakeTarget>);

impl Module for FakeModule {
    const NAME: &'static str = "fake";

    fn methods() -> Vec<Method<FakeModule>> {
        Vec::new()
    }

    fn balanced(&self) -> Vec<Arc<dyn BalancedTarget>> {
        vec![self.0.clone()]
    }
}

struct Rig {
    plane: Arc<ControlPlane>,
    asked: Receiver<()>,
    moves: Receiver<Vec<ConnectionMove>>,
}

fn rig(reactors: Vec<ManagedReactor>) -> Rig {
    let builder = ControlPlane::builder(reactors);
    let scheduler = SchedulerModule::new(builder.balancer());
    let ((asked, of_asked), (moves, of_moves)) = (sync_channel(1), sync_channel(1));
    let target = Arc::new(FakeModule(Arc::new(FakeTarget { asked, moves })));
    let plane = builder.module(&scheduler).module(&target).start(None).unwrap();
    Rig { plane, asked: of_asked, moves: of_moves }
}

impl Rig {
    fn set(&self, params: Value) -> Result<Value, RpcError> {
        self.plane.invoke("framework_set_scheduler", params)
    }
}

#[test]
fn the_scheduler_is_what_was_set_and_is_saved() {
    let rig = rig(Vec::new());
    let get = || rig.plane.invoke("framework_get_scheduler", Value::Null).unwrap();
    assert_eq!((&get()["scheduler_name"], &get()["scheduler_period"]), (&json!("static"), &json!(0)));
    for (params, name, period) in [
        (json!({ "name": "dynamic" }), "dynamic", 100_000),
        (json!({ "name": "dynamic", "period": 20_000, "core_limit": 80 }), "dynamic", 20_000),
        (json!({ "name": "static", "period": 5 }), "static", 0),
    ] {
        assert_eq!(rig.set(params.clone()).unwrap(), true, "{params}");
        assert_eq!((&get()["scheduler_name"], &get()["scheduler_period"]), (&json!(name), &json!(period)));
    }
    for (params, expected) in [
        (json!({ "name": "gscheduler" }), "name: \"gscheduler\" is not supported"),
        (json!({ "name": "dynamic", "period": 9_999 }), "period: expected 10000 to 60000000"),
        (json!({ "name": "dynamic", "period": 60_000_001 }), "period: expected 10000 to 60000000"),
    ] {
        let message = rig.set(params).err().map(|error| error.message).unwrap_or_default();
        assert!(message.contains(expected), "{message}");
    }
    let saved = rig.plane.save_subsystem("scheduler").unwrap();
    let params = json!({ "name": "static", "period": 5 });
    assert_eq!(saved, [json!({ "method": "framework_set_scheduler", "params": params })]);
}

#[test]
fn targets_are_asked_while_it_is_dynamic_and_not_otherwise() {
    let rig = rig(Vec::new());
    rig.set(json!({ "name": "dynamic", "period": 10_000 })).unwrap();
    for _ in 0..3 {
        rig.asked.recv_timeout(LONG).unwrap();
    }
    // No reactor was busy.
    assert!(rig.moves.try_recv().is_err());
    rig.plane.drain();
    // What the thread had sent before it ended.
    while rig.asked.try_recv().is_ok() {}
    rig.set(json!({ "name": "static" })).unwrap();
    assert!(rig.asked.try_recv().is_err());
    drop(rig.plane);
}
