//! A module of another crate on the stacking kit: the mirror of `examples/mirror`, used through its methods.
#![allow(clippy::unwrap_used)]

#[path = "../examples/mirror/mirror.rs"]
mod mirror;
mod rig;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bdev::error::{FaultAction, FaultInjection};
use bdev::rpc::BdevModule;
use bdev::{Access, BdevChannel, Registry, error};
use block_io::{Channel as _, Op, Request, Status, Tag};
use control::ControlPlane;
use control::json::{Value, json};
use rig::Rig;

const BLOCKS: u64 = 1024;

struct Mirrors {
    rig: Rig,
    plane: Arc<ControlPlane>,
}

impl Mirrors {
    fn new() -> Mirrors {
        let rig = Rig::new();
        let builder = ControlPlane::builder(Vec::new());
        let bdevs = BdevModule::new(rig.registry.clone(), builder.examiner());
        let mirrors = mirror::MirrorModule::new(bdevs.clone(), rig.reactor.handle());
        let plane = builder.module(&bdevs).module(&mirrors).start(None).unwrap();
        Mirrors { rig, plane }
    }

    /// With the bases `A` and `B`, and the mirror `M` on them.
    fn created() -> Mirrors {
        let mirrors = Mirrors::new();
        ["A", "B"].iter().for_each(|name| mirrors.create_base(name));
        mirrors.create();
        mirrors
    }

    fn call(&self, method: &str, params: Value) -> Value {
        let result = self.plane.invoke(method, params.clone());
        result.unwrap_or_else(|error| panic!("{method} {params}: {error}"))
    }

    fn create_base(&self, name: &str) {
        self.call("bdev_malloc_create", json!({ "name": name, "num_blocks": BLOCKS, "block_size": 512 }));
        self.call("bdev_wait_for_examine", json!({}));
    }

    fn create(&self) {
        assert_eq!(self.call("bdev_mirror_create", json!({ "name": "M", "base_bdevs": ["A", "B"] })), "M");
    }

    /// Calls a method from another thread while the channel's core runs.
    fn call_beside(&mut self, channel: &mut BdevChannel, method: &'static str, params: Value) {
        let (plane, is_done) = (self.plane.clone(), Arc::new(AtomicBool::new(false)));
        let done = is_done.clone();
        let thread = std::thread::spawn(move || {
            let result = plane.invoke(method, params);
            done.store(true, Ordering::Release);
            result
        });
        let mut sink = Vec::new();
        while !is_done.load(Ordering::Acquire) {
            self.rig.reactor.turn();
            channel.poll(&mut sink);
            std::thread::yield_now();
        }
        assert_eq!(thread.join().unwrap().unwrap(), json!(true));
        assert!(sink.is_empty());
    }

    fn open(&self) -> BdevChannel {
        let descriptor = self.rig.registry.open("M", Access::ReadWrite).unwrap();
        descriptor.channel(&self.rig.core).unwrap()
    }

    fn state(&self, member: &str) -> Value {
        let shown = self.call("bdev_get_bdevs", json!({ "name": "M" }));
        shown[0]["driver_specific"]["mirror"][member].clone()
    }

    /// Runs the core, with writes of the user now and then, until both bases have all data.
    fn wait_in_sync(&mut self, channel: &mut BdevChannel, mut write: impl FnMut(&mut Rig, &mut BdevChannel)) {
        let start = Instant::now();
        while self.state("in_sync") != json!(["A", "B"]) {
            write(&mut self.rig, channel);
            self.rig.reactor.turn();
            assert!(start.elapsed() < Duration::from_secs(30), "{:?}", self.state("copied_to"));
        }
    }

    /// The first byte of each block of a base that no device stands on.
    fn contents(&mut self, name: &str) -> Vec<u8> {
        let descriptor = self.rig.registry.open(name, Access::ReadOnly).unwrap();
        let mut channel = descriptor.channel(&self.rig.core).unwrap();
        let data = self.rig.read(&mut channel, 0, BLOCKS as u32).unwrap();
        data.chunks(512).map(|block| block[0]).collect()
    }
}

#[test]
fn a_mirror_is_created_when_its_last_base_appears_and_is_saved() {
    let mirrors = Mirrors::new();
    mirrors.create();
    for name in ["A", "B"] {
        assert!(mirrors.rig.registry.find("M").is_none());
        mirrors.create_base(name);
    }
    let shown = mirrors.call("bdev_get_bdevs", json!({ "name": "M" }));
    assert_eq!((&shown[0]["num_blocks"], &shown[0]["product_name"]), (&json!(BLOCKS), &json!("mirror")));
    let base = mirrors.call("bdev_get_bdevs", json!({ "name": "B" }));
    assert_eq!(
        (&base[0]["claim_type"], &base[0]["claimed_by"]),
        (&json!("exclusive_write"), &json!("mirror bdev M"))
    );
    let saved = mirrors.call("framework_get_config", json!({ "name": "bdev" }));
    let methods: Vec<&str> =
        saved.as_array().unwrap().iter().map(|call| call["method"].as_str().unwrap()).collect();
    assert_eq!(methods, ["bdev_malloc_create", "bdev_malloc_create", "bdev_mirror_create"]);
    assert_eq!(
        saved[2]["params"],
        json!({ "name": "M", "base_bdevs": ["A", "B"], "uuid": shown[0]["uuid"] })
    );

    assert_eq!(mirrors.call("bdev_mirror_delete", json!({ "name": "M" })), json!(true));
    assert!(mirrors.rig.registry.claims().is_empty());
    let refused = mirrors.plane.invoke("bdev_mirror_create", json!({ "name": "M", "base_bdevs": ["A"] }));
    assert_eq!(refused.unwrap_err().message, "base_bdevs: a mirror has 2 bases, not 1");
    mirrors.create();
    mirrors.plane.stop();
    assert!(mirrors.rig.registry.list().is_empty());
}

#[test]
fn a_mirror_survives_the_loss_of_a_base_and_copies_one_that_returns() {
    let mut mirrors = Mirrors::created();
    let mut channel = mirrors.open();
    for lba in 0..BLOCKS {
        assert!(mirrors.rig.write(&mut channel, lba, 1, 1).is_success());
    }
    assert_eq!(
        [mirrors.contents("A"), mirrors.contents("B")],
        [vec![1; BLOCKS as usize], vec![1; BLOCKS as usize]]
    );

    // Its channel does nothing at the time, and closes the base all the same.
    mirrors.call_beside(&mut channel, "bdev_malloc_delete", json!({ "name": "A" }));
    assert_eq!(mirrors.state("in_sync"), json!(["B"]));
    assert!(mirrors.rig.write(&mut channel, 7, 1, 2).is_success());
    assert_eq!(mirrors.rig.read(&mut channel, 7, 1).unwrap()[0], 2);

    mirrors.create_base("A");
    assert_eq!(mirrors.state("copied_to"), json!(["A"]));
    let mut next = 0;
    mirrors.wait_in_sync(&mut channel, |rig, channel| {
        // Before, inside and behind what is being copied.
        next = (next + 37) % BLOCKS;
        assert!(rig.write(channel, next, 1, 3).is_success());
        assert_eq!(rig.read(channel, next, 1).unwrap()[0], 3);
    });
    let (one, other) = (mirrors.contents("A"), mirrors.contents("B"));
    assert!(one == other && one[7] != 0);

    mirrors.call_beside(&mut channel, "bdev_malloc_delete", json!({ "name": "B" }));
    let read = mirrors.rig.read(&mut channel, 0, BLOCKS as u32).unwrap();
    assert_eq!(read.chunks(512).map(|block| block[0]).collect::<Vec<u8>>(), other);
    // The last one takes the mirror with it, and this returns with both.
    drop(channel);
    mirrors.call("bdev_malloc_delete", json!({ "name": "A" }));
    assert!(mirrors.rig.registry.find("M").is_none());
    ["A", "B"].iter().for_each(|name| mirrors.create_base(name));
    assert_eq!(mirrors.state("in_sync"), json!(["A", "B"]));
}

#[test]
fn a_read_that_fails_goes_to_the_other_base_and_a_failed_write_ends_reads_of_its_base() {
    let mut mirrors = Mirrors::new();
    let registry: Registry = mirrors.rig.registry.clone();
    for name in ["A", "B"] {
        mirrors.create_base(name);
        mirrors.call("bdev_error_create", json!({ "base_name": name }));
    }
    mirrors.call("bdev_mirror_create", json!({ "name": "M", "base_bdevs": ["EE_A", "EE_B"] }));
    let mut channel = mirrors.open();
    assert!(mirrors.rig.write(&mut channel, 0, 8, 1).is_success());
    let fail = |base: &str, op| {
        let fault = FaultInjection::once(Some(op), FaultAction::Fail(Status::WRITE_FAULT));
        error::inject(&registry, base, fault).unwrap();
    };
    fail("EE_A", Op::Read);
    assert_eq!(mirrors.rig.read(&mut channel, 0, 8).unwrap()[0], 1);
    assert_eq!(mirrors.state("in_sync"), json!(["EE_A", "EE_B"]));
    fail("EE_A", Op::Read);
    fail("EE_B", Op::Read);
    assert_eq!(mirrors.rig.read(&mut channel, 0, 8), Err(Status::WRITE_FAULT));

    fail("EE_A", Op::Write);
    assert!(mirrors.rig.write(&mut channel, 0, 8, 2).is_success());
    assert_eq!(mirrors.state("in_sync"), json!(["EE_B"]));
    assert_eq!(mirrors.rig.read(&mut channel, 0, 8).unwrap()[0], 2);
    // The last base with all data keeps it, and the user learns of the error.
    fail("EE_B", Op::Write);
    assert_eq!(mirrors.rig.write(&mut channel, 0, 8, 3), Status::WRITE_FAULT);
    assert_eq!(mirrors.state("in_sync"), json!(["EE_B"]));
}

#[test]
fn a_mirror_takes_many_requests_and_shrinks_with_a_base() {
    let mut mirrors = Mirrors::new();
    for name in ["A", "B"] {
        mirrors.call("bdev_null_create", json!({ "name": name, "num_blocks": 4096, "block_size": 512 }));
    }
    mirrors.create();
    let mut channel = mirrors.open();
    let batch = (0..2000u64)
        .map(|tag| {
            let buffer = mirrors.rig.buffer(512, 0);
            match tag % 3 {
                0 => Request::read(Tag(tag), tag, 1, buffer),
                1 => Request::write(Tag(tag), tag, 1, buffer),
                _ => Request::new(Tag(tag), Op::Flush, 0, 0),
            }
        })
        .collect();
    let completions = mirrors.rig.run(&mut channel, batch);
    for (tag, completion) in (0..).zip(&completions) {
        assert_eq!((completion.tag(), completion.status()), (Tag(tag), Status::SUCCESS));
        assert!(completion.request().data().is_none_or(|data| data.is_writable()));
    }
    mirrors.call("bdev_null_resize", json!({ "name": "A", "new_size": 1 }));
    assert_eq!(channel.blocks(), 2048);
}
