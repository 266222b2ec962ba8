//! The driver against a controller in software that behaves.
#![allow(clippy::unwrap_used)]

mod rig;

use nvme::simulated::Config;
use nvme::{AdminData, Controller, Fault, Injection, Interrupts, Namespace, OpenError, Options};
use reactor::{IdlePolicy, Period};
use rig::{attach, buffer, finish, on_device, open, options, status, until};
use ring::{Channel, Flags, Op, Request, Status, Tag};
use wire_nvme::identify::{oacs, oncs};

/// Bytes that are different everywhere and in every round.
fn pattern(round: u64, bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|at| (at / 512 * 31 + at + round * 7) as u8).collect()
}

fn writes_and_reads(config: Config, block: u32) {
    on_device(config, async move |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        assert_eq!(namespace.block_size(), block);
        let most = namespace.transfer_max_bytes();
        // One page, two, a list, the longest; and offsets that are none of pages.
        let sizes = [block, 4096, 8192, 12288, 65536, most - block, most];
        for (round, bytes) in sizes.into_iter().enumerate() {
            let data = pattern(round as u64, bytes as usize);
            let mut write = core.pool().take(bytes as usize).unwrap();
            write.as_mut_slice().copy_from_slice(&data);
            let (lba, blocks) = (round as u64 * 3, bytes / block);
            let done = finish(&core, &mut namespace, vec![Request::write(Tag(1), lba, blocks, write)]).await;
            assert_eq!(done[0].status(), Status::SUCCESS, "writing {bytes}");
            let at = lba as usize * block as usize;
            assert_eq!(&device.disk(1)[at..at + data.len()], &data[..], "written {bytes}");
            let read = Request::read(Tag(2), lba, blocks, buffer(&core, bytes as usize, 0xee));
            let done = finish(&core, &mut namespace, vec![read]).await;
            assert_eq!(done[0].request().buffer.as_ref().unwrap().as_slice(), data, "reading {bytes}");
        }
    });
}

#[test]
fn data_of_every_size_arrives_through_prps() {
    writes_and_reads(Config::new(4096, 512), 512);
    writes_and_reads(Config::new(1024, 4096), 4096);
}

#[test]
fn data_of_every_size_arrives_through_sgls() {
    let mut config = Config::new(4096, 512);
    config.identity.sgls = 1;
    writes_and_reads(config, 512);
}

#[test]
fn data_arrives_with_shadow_doorbells() {
    let mut config = Config::new(4096, 512);
    config.identity.oacs |= oacs::DOORBELL_BUFFER;
    writes_and_reads(config.clone(), 512);
    on_device(config, async |core, device| {
        assert!(attach(&core, &device).await.has_shadow_doorbells());
    });
}

#[test]
fn data_arrives_with_wide_doorbells_and_large_pages() {
    let mut config = Config::new(4096, 512);
    config.capabilities.doorbell_stride_log2 = 3;
    writes_and_reads(config, 512);
}

#[test]
fn every_operation_does_what_it_says() {
    on_device(Config::new(1024, 512), async |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        let write = Request::write(Tag(0), 0, 64, buffer(&core, 64 * 512, 7));
        assert_eq!(status(&core, &mut namespace, write).await, Status::SUCCESS);
        let mut unmap = Request::new(Tag(1), Op::Unmap, 8, 8);
        unmap.flags = Flags::NONE;
        assert_eq!(status(&core, &mut namespace, unmap).await, Status::SUCCESS);
        let zeroes = Request::new(Tag(2), Op::WriteZeroes, 32, 8);
        assert_eq!(status(&core, &mut namespace, zeroes).await, Status::SUCCESS);
        let flush = Request::new(Tag(3), Op::Flush, 0, 0);
        assert_eq!(status(&core, &mut namespace, flush).await, Status::SUCCESS);
        let disk = device.disk(1);
        for (block, bytes) in disk.chunks(512).take(64).enumerate() {
            let zero = (8..16).contains(&block) || (32..40).contains(&block);
            assert!(bytes.iter().all(|byte| *byte == if zero { 0 } else { 7 }), "block {block}");
        }
    });
}

#[test]
fn what_cannot_be_a_command_is_refused() {
    let mut config = Config::new(1024, 512);
    config.identity.oncs &= !(oncs::DATASET_MANAGEMENT | oncs::WRITE_ZEROES);
    on_device(config, async |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        let invalid = Status::INVALID_FIELD.do_not_retry();
        let opcode = Status::INVALID_OPCODE.do_not_retry();
        let most = namespace.transfer_max_bytes() as usize;
        let cases = [
            (Request::read(Tag(0), 0, 2, buffer(&core, 512, 0)), invalid),
            (Request::read(Tag(0), 0, 0, buffer(&core, 512, 0)), invalid),
            (Request::new(Tag(0), Op::Write, 0, 1), invalid),
            (Request::write(Tag(0), 0, (most / 512) as u32 + 1, buffer(&core, most + 512, 0)), invalid),
            (Request::new(Tag(0), Op::Unmap, 0, 1), opcode),
            (Request::new(Tag(0), Op::WriteZeroes, 0, 1), opcode),
            (Request::new(Tag(0), Op::WriteZeroes, 0, 0), invalid),
            (Request::new(Tag(0), Op::Reset, 0, 0), opcode),
            (Request::read(Tag(0), 1024, 1, buffer(&core, 512, 0)), Status::LBA_OUT_OF_RANGE.do_not_retry()),
        ];
        for (request, want) in cases {
            let text = format!("{request:?}");
            assert_eq!(status(&core, &mut namespace, request).await, want, "{text}");
        }
        assert_eq!(namespace.queue_pair().unwrap().in_flight(), 0);
    });
}

#[test]
fn a_full_queue_leaves_the_rest_with_the_caller() {
    on_device(Config::new(1024, 512), async |core, device| {
        let options = Options { queue_depth: 4, ..options() };
        let mut namespace = open(&core, &device, &options).await;
        let mut batch: Vec<_> =
            (0..10).map(|tag| Request::read(Tag(tag), tag, 1, buffer(&core, 512, 0))).collect();
        namespace.submit(&mut batch);
        assert_eq!(batch.len(), 6);
        assert_eq!(batch[0].tag, Tag(4), "the first ones were taken, in order");
        let mut done = Vec::new();
        while done.len() < 10 {
            namespace.poll(&mut done);
            namespace.submit(&mut batch);
            rig::next_turn().await;
        }
        let mut tags: Vec<u64> = done.iter().map(|completion| completion.tag().0).collect();
        tags.sort_unstable();
        assert_eq!(tags, (0..10).collect::<Vec<_>>());
        let stats = namespace.queue_pair().unwrap().stats();
        assert_eq!((stats.submitted, stats.completed), (10, 10));
        assert!(stats.full > 0);
    });
}

#[test]
fn the_rings_wrap_many_times() {
    on_device(Config::new(4096, 512), async |core, device| {
        let options = Options { queue_depth: 7, ..options() };
        let mut namespace = open(&core, &device, &options).await;
        for round in 0..100 {
            let batch: Vec<_> = (0..20)
                .map(|tag| Request::write(Tag(tag), tag, 1, buffer(&core, 512, (tag + round) as u8)))
                .collect();
            let done = finish(&core, &mut namespace, batch).await;
            assert!(done.iter().all(|completion| completion.status().is_success()));
        }
        for (block, bytes) in device.disk(1).chunks(512).take(20).enumerate() {
            assert!(bytes.iter().all(|byte| *byte == (block + 99) as u8), "block {block}");
        }
    });
}

#[test]
fn lent_memory_goes_through_a_copy() {
    on_device(Config::new(1024, 512), async |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        let region = std::rc::Rc::new(memory::SharedRegion::new(1 << 20).unwrap());
        region.write(4096, &pattern(1, 2048));
        let loan = core.pool().lend(region.clone());
        let write = Request::write(Tag(0), 0, 4, loan.buffer(4096, 2048).unwrap());
        assert_eq!(status(&core, &mut namespace, write).await, Status::SUCCESS);
        assert_eq!(&device.disk(1)[..2048], pattern(1, 2048));
        let read = Request::read(Tag(0), 0, 4, loan.buffer(65536, 2048).unwrap());
        assert_eq!(status(&core, &mut namespace, read).await, Status::SUCCESS);
        let mut back = vec![0; 2048];
        region.read(65536, &mut back);
        assert_eq!(back, pattern(1, 2048));
    });
}

#[test]
fn injected_faults_hit_as_often_as_was_said() {
    on_device(Config::new(1024, 512), async |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        let fault = Fault::Status(Status::WRITE_FAULT);
        assert!(namespace.queue_pair().unwrap().inject(Injection { opcode: 1, count: 2, fault }));
        let mut outcomes = Vec::new();
        for _ in 0..3 {
            let write = Request::write(Tag(0), 0, 1, buffer(&core, 512, 1));
            outcomes.push(status(&core, &mut namespace, write).await);
            let read = Request::read(Tag(0), 0, 1, buffer(&core, 512, 1));
            assert_eq!(status(&core, &mut namespace, read).await, Status::SUCCESS);
        }
        assert_eq!(outcomes, [Status::WRITE_FAULT, Status::WRITE_FAULT, Status::SUCCESS]);
        assert_eq!(namespace.queue_pair().unwrap().stats().errors, 2);
    });
}

#[test]
fn a_queue_pair_that_is_dropped_is_deleted_and_its_identifier_used_again() {
    let mut config = Config::new(1024, 512);
    config.queues = 2;
    on_device(config, async |core, device| {
        let controller = attach(&core, &device).await;
        assert_eq!(controller.queues_max(), 2);
        for round in 0..5 {
            let one = controller.qpair(&core, &options()).await.unwrap();
            let mut two = Namespace::of(&controller, &core, 1, &options()).await.unwrap();
            let third = controller.qpair(&core, &options()).await;
            assert!(matches!(third, Err(OpenError::NoQueue(2))), "round {round}");
            // Dropped with I/O in flight, which nobody will ever see complete.
            two.submit(&mut vec![Request::read(Tag(0), 0, 1, buffer(&core, 512, 0))]);
            drop((one, two));
            until(&core, "queues are deleted", || device.queues() == 0).await;
        }
        drop(controller);
        until(&core, "the controller is shut down", || !device.reaches_memory()).await;
    });
}

#[test]
fn queue_pairs_live_on_cores_of_their_own() {
    let device = nvme::simulated::Simulated::new(Config::new(1 << 16, 512));
    let cpu = sys::CpuSet::allowed().cpus()[0];
    let cpus = sys::CpuSet::new(vec![cpu, cpu + 1, cpu + 2]).unwrap();
    let config = reactor::Config { cpus, ..rig::reactor_config(IdlePolicy::default()) };
    let reactors = reactor::Reactors::start(&config).unwrap();
    let (sender, controllers) = std::sync::mpsc::channel();
    let stepped = device.clone();
    reactors.remotes()[0]
        .post(move |core| {
            core.add_poller(stepped.poller(), Period::EveryTurn);
            let core = core.clone();
            core.clone().spawn(async move {
                let _ = sender.send(attach(&core, &stepped).await);
            });
        })
        .unwrap();
    let controller = controllers.recv_timeout(std::time::Duration::from_secs(10)).unwrap();
    let (sender, ended) = std::sync::mpsc::channel();
    for (index, remote) in reactors.remotes().iter().enumerate() {
        let (controller, sender) = (controller.clone(), sender.clone());
        let place = index as u64 * 64;
        remote
            .post(move |core| {
                let core = core.clone();
                core.clone().spawn(async move {
                    let mut namespace = Namespace::of(&controller, &core, 1, &options()).await.unwrap();
                    for round in 0..50 {
                        let fill = (place + round) as u8;
                        let batch: Vec<_> = (0..16)
                            .map(|tag| Request::write(Tag(tag), place + tag, 1, buffer(&core, 512, fill)))
                            .collect();
                        let done = finish(&core, &mut namespace, batch).await;
                        assert!(done.iter().all(|completion| completion.status().is_success()));
                    }
                    let _ = sender.send(index);
                });
            })
            .unwrap();
    }
    drop(controller);
    for _ in 0..3 {
        ended.recv_timeout(std::time::Duration::from_secs(20)).unwrap();
    }
    let disk = device.disk(1);
    for index in 0..3 {
        let block = index * 64;
        assert!(disk[block * 512..(block + 16) * 512].iter().all(|byte| *byte == (block + 49) as u8));
    }
    reactors.stop();
    assert!(!device.reaches_memory(), "the last user's end is the controller's");
}

#[test]
fn a_core_that_sleeps_is_woken_by_the_interrupt() {
    let reactor = reactor::Reactor::new(&rig::reactor_config(IdlePolicy::Sleep)).unwrap();
    let core = reactor.core();
    let device = nvme::simulated::Simulated::new(Config::new(1024, 512));
    // The device runs on a thread of its own: the core that sleeps cannot step it.
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (stepped, until) = (device.clone(), stop.clone());
    let thread = std::thread::spawn(move || {
        while !until.load(std::sync::atomic::Ordering::Relaxed) {
            stepped.step();
            std::thread::yield_now();
        }
    });
    reactor.block_on(async move {
        let options = Options { interrupts: Interrupts::On, io_timeout_ns: 0, ..options() };
        let mut namespace = open(&core, &device, &options).await;
        for round in 0..20 {
            let mut batch = vec![Request::read(Tag(round), 0, 1, buffer(&core, 512, 0))];
            namespace.submit(&mut batch);
            let mut done = Vec::new();
            assert_eq!(namespace.deadline(), None, "nothing forbids sleep");
            while namespace.poll(&mut done) == 0 {
                core.next_event().await;
            }
            assert_eq!(done[0].status(), Status::SUCCESS);
        }
    });
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    thread.join().unwrap();
}

#[test]
fn admin_commands_pass_through_from_any_core() {
    on_device(Config::new(1024, 512), async |core, device| {
        let controller = attach(&core, &device).await;
        assert_eq!(controller.active_namespaces().await.unwrap(), [1]);
        let view = wire_nvme::admin::GetFeatures { fid: 6, ..Default::default() };
        let answer = controller.features(&view, 0, AdminData::None).await.unwrap();
        assert_eq!(answer.result, 0x1234);
        let page = controller
            .identify(&wire_nvme::admin::Identify { cns: 1, ..Default::default() }, 0)
            .await
            .unwrap();
        assert_eq!(page.len(), 4096);
        for opcode in [0, 1, 4, 5, 0x0c, 0x7c] {
            let refused = controller.admin(wire_nvme::Sqe::new(opcode), AdminData::None).await;
            assert_eq!(
                refused,
                Err(nvme::AdminError::Status(Status::INVALID_OPCODE.do_not_retry())),
                "{opcode:#x} is the driver's own"
            );
        }
        let long = controller.admin(wire_nvme::Sqe::new(6), AdminData::In(2 << 20)).await;
        assert_eq!(long, Err(nvme::AdminError::Length(2 << 20)));
    });
}

#[test]
fn private_memory_is_refused_with_the_way_out() {
    let reactor = reactor::Reactor::new(&reactor::Config::default()).unwrap();
    let core = reactor.core();
    reactor.block_on(async move {
        let uri = "nvme+vfio-user:/nowhere?ns=1".parse().unwrap();
        let error = Namespace::open(&core, &uri, &options()).await.err().unwrap();
        assert!(matches!(error, OpenError::NotShared(_)));
        assert!(error.to_string().contains("shared: true"), "{error}");
        let missing = "nvme+pcie://ffff:ff:1f.7".parse().unwrap();
        let error = Namespace::open(&core, &missing, &options()).await.err().unwrap();
        assert!(error.to_string().contains("ffff:ff:1f.7"), "{error}");
    });
}

#[test]
fn a_queue_pair_says_what_it_costs() {
    on_device(Config::new(4096, 512), async |core, device| {
        let options = Options { count_costs: true, ..options() };
        let controller = Controller::attach_device(&core, device.device(), &options).await.unwrap();
        let mut namespace = Namespace::of(&controller, &core, 1, &options).await.unwrap();
        let batch = (0..64).map(|tag| Request::read(Tag(tag), tag, 1, buffer(&core, 512, 0))).collect();
        finish(&core, &mut namespace, batch).await;
        let pair = namespace.queue_pair().unwrap();
        let costs = pair.costs();
        assert_eq!((costs.submitted, costs.completed), (64, 64));
        assert!(costs.submit_ns > 0 && costs.complete_ns > 0);
        let (own, device_bytes) = pair.memory_bytes();
        println!("a queue pair of depth 128 holds {own} bytes and {device_bytes} bytes that the device sees");
        assert!(own < 32 << 10 && device_bytes <= 40 << 10, "{own} and {device_bytes}");
        let stats = pair.stats();
        assert!(stats.doorbells <= 2 * stats.batches + stats.polls);
        pair.count_costs(false);
        finish(&core, &mut namespace, vec![Request::new(Tag(0), Op::Flush, 0, 0)]).await;
        assert_eq!(namespace.queue_pair().unwrap().costs().submitted, 64);
    });
}
