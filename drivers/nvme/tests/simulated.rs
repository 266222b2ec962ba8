//! The driver against a simulated controller without faults.
#![allow(clippy::unwrap_used)]

mod rig;

use block_io::{Channel, Op, Request, RequestFlags, Status, Tag};
use dma::Data;
use nvme::testing::SimulatedConfig;
use nvme::{
    AdminData, CompletionFault, CompletionInjection, Controller, InterruptMode, Namespace, NvmeOpenError,
    Options,
};
use reactor::{IdlePolicy, Period};
use rig::{attach, buffer, finish, on_device, open, options, status, until};
use wire_nvme::identify::{oacs, oncs};

/// A test pattern that differs by block and round.
fn pattern(round: u64, bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|at| (at / 512 * 31 + at + round * 7) as u8).collect()
}

fn writes_and_reads(config: SimulatedConfig, block: u32) {
    on_device(config, async move |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        assert_eq!(namespace.block_size(), block);
        let bytes_max = namespace.transfer_max_bytes();
        // One page, two pages, a PRP list and the longest transfer, at LBAs that are not page-aligned.
        let sizes = [block, 4096, 8192, 12288, 65536, bytes_max - block, bytes_max];
        for (round, bytes) in sizes.into_iter().enumerate() {
            let data = pattern(round as u64, bytes as usize);
            let mut write = core.pool().take(bytes as usize).unwrap();
            write.as_mut_slice().copy_from_slice(&data);
            let (lba, blocks) = (round as u64 * 3, bytes / block);
            let done = finish(&core, &mut namespace, vec![Request::write(Tag(1), lba, blocks, write)]).await;
            assert_eq!(done[0].status(), Status::SUCCESS, "writing {bytes}");
            let at = lba as usize * block as usize;
            assert_eq!(&device.namespace_data(1)[at..at + data.len()], &data[..], "written {bytes}");
            let read = Request::read(Tag(2), lba, blocks, buffer(&core, bytes as usize, 0xee));
            let done = finish(&core, &mut namespace, vec![read]).await;
            assert_eq!(
                done[0].request().data().and_then(Data::single).unwrap().as_slice(),
                data,
                "reading {bytes}"
            );
        }
    });
}

#[test]
fn transfers_of_all_sizes_work_with_prps() {
    writes_and_reads(SimulatedConfig::new(4096, 512), 512);
    writes_and_reads(SimulatedConfig::new(1024, 4096), 4096);
}

#[test]
fn transfers_of_all_sizes_work_with_sgls() {
    let mut config = SimulatedConfig::new(4096, 512);
    config.identity.sgls = 1;
    writes_and_reads(config, 512);
}

/// Data of several slices: lengths, each with the offset of its first byte in a page.
fn slices(core: &reactor::Core, shape: &[(usize, usize)], fill: u8) -> Data {
    let slice = |(offset, length): &(usize, usize)| {
        let mut whole = buffer(core, offset + length, fill);
        if *offset > 0 { whole.split_off(*offset) } else { whole }
    };
    Data::gather(shape.iter().map(slice).collect()).unwrap()
}

/// Writes and reads data of several slices, each with one command.
fn writes_and_reads_slices(sgls: u32) {
    let mut config = SimulatedConfig::new(4096, 512);
    config.identity.sgls = sgls;
    on_device(config, async |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        let pages = vec![(0, 4096); 100];
        let shapes: [&[(usize, usize)]; 8] = [
            // Slices that meet at page boundaries: two, three and many pages.
            &[(3584, 512), (0, 512)],
            &[(512, 3584), (0, 4096), (0, 512)],
            &[(0, 8192), (0, 16384), (0, 512)],
            &pages,
            // Slices that do not.
            &[(512, 512), (1024, 512)],
            &[(0, 512); 9],
            &[(4, 1000), (8, 3096)],
            // Misaligned, which nothing but a copy can serve where dwords are needed.
            &[(1, 513), (3, 511)],
        ];
        for (round, shape) in shapes.into_iter().enumerate() {
            let bytes: usize = shape.iter().map(|(_, length)| length).sum();
            let expected = pattern(round as u64, bytes);
            let mut data = slices(&core, shape, 0);
            data.copy_from(0, &expected);
            let (lba, blocks) = (round as u64 * 5, (bytes / 512) as u32);
            let before = device.executed();
            let done = finish(&core, &mut namespace, vec![Request::write(Tag(1), lba, blocks, data)]).await;
            assert_eq!(done[0].status(), Status::SUCCESS, "writing {shape:?}");
            let at = lba as usize * 512;
            assert_eq!(&device.namespace_data(1)[at..at + bytes], &expected[..], "written {shape:?}");
            let read = Request::read(Tag(2), lba, blocks, slices(&core, shape, 0xee));
            let mut done = finish(&core, &mut namespace, vec![read]).await;
            assert_eq!(device.executed() - before, 2, "one command each");
            let data = done.remove(0).into_request().take_data().unwrap();
            let mut bytes = vec![0; bytes];
            data.copy_to(0, &mut bytes);
            assert!(bytes == expected, "reading {shape:?}");
            assert_eq!(data.slices().len(), shape.len());
        }
    });
}

#[test]
fn data_of_several_slices_is_one_command_with_prps_or_a_copy() {
    writes_and_reads_slices(0);
}

#[test]
fn data_of_several_slices_is_one_command_with_sgls() {
    // Bytes, then dwords.
    writes_and_reads_slices(1);
    writes_and_reads_slices(2);
}

#[test]
fn transfers_work_with_shadow_doorbells() {
    let mut config = SimulatedConfig::new(4096, 512);
    config.identity.oacs |= oacs::DOORBELL_BUFFER;
    writes_and_reads(config.clone(), 512);
    on_device(config, async |core, device| {
        assert!(attach(&core, &device).await.has_shadow_doorbells());
    });
}

#[test]
fn transfers_work_with_a_wide_doorbell_stride() {
    let mut config = SimulatedConfig::new(4096, 512);
    config.capabilities.doorbell_stride_log2 = 3;
    writes_and_reads(config, 512);
}

#[test]
fn write_unmap_write_zeroes_and_flush_have_their_effect() {
    on_device(SimulatedConfig::new(1024, 512), async |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        let write = Request::write(Tag(0), 0, 64, buffer(&core, 64 * 512, 7));
        assert_eq!(status(&core, &mut namespace, write).await, Status::SUCCESS);
        let mut unmap = Request::new(Tag(1), Op::Unmap, 8, 8);
        unmap.flags = RequestFlags::NONE;
        assert_eq!(status(&core, &mut namespace, unmap).await, Status::SUCCESS);
        let zeroes = Request::new(Tag(2), Op::WriteZeroes, 32, 8);
        assert_eq!(status(&core, &mut namespace, zeroes).await, Status::SUCCESS);
        let flush = Request::new(Tag(3), Op::Flush, 0, 0);
        assert_eq!(status(&core, &mut namespace, flush).await, Status::SUCCESS);
        let disk = device.namespace_data(1);
        for (block, bytes) in disk.chunks(512).take(64).enumerate() {
            let zero = (8..16).contains(&block) || (32..40).contains(&block);
            assert!(bytes.iter().all(|byte| *byte == if zero { 0 } else { 7 }), "block {block}");
        }
    });
}

#[test]
fn invalid_requests_complete_with_an_error() {
    let mut config = SimulatedConfig::new(1024, 512);
    config.identity.oncs &= !(oncs::DATASET_MANAGEMENT | oncs::WRITE_ZEROES);
    on_device(config, async |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        let invalid = Status::INVALID_FIELD.do_not_retry();
        let opcode = Status::INVALID_OPCODE.do_not_retry();
        let bytes_max = namespace.transfer_max_bytes() as usize;
        let cases = [
            (Request::read(Tag(0), 0, 2, buffer(&core, 512, 0)), invalid),
            (Request::read(Tag(0), 0, 0, buffer(&core, 512, 0)), invalid),
            (Request::new(Tag(0), Op::Write, 0, 1), invalid),
            (
                Request::write(Tag(0), 0, (bytes_max / 512) as u32 + 1, buffer(&core, bytes_max + 512, 0)),
                invalid,
            ),
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
fn requests_beyond_the_queue_depth_stay_in_the_batch() {
    on_device(SimulatedConfig::new(1024, 512), async |core, device| {
        let options = Options { queue_depth: 4, ..options() };
        let mut namespace = open(&core, &device, &options).await;
        let mut batch: Vec<_> =
            (0..10).map(|tag| Request::read(Tag(tag), tag, 1, buffer(&core, 512, 0))).collect();
        namespace.submit(&mut batch);
        assert_eq!(batch.len(), 6);
        assert_eq!(batch[0].tag, Tag(4), "the first four were submitted, in order");
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
fn rings_wrap_around() {
    on_device(SimulatedConfig::new(4096, 512), async |core, device| {
        let options = Options { queue_depth: 7, ..options() };
        let mut namespace = open(&core, &device, &options).await;
        for round in 0..100 {
            let batch: Vec<_> = (0..20)
                .map(|tag| Request::write(Tag(tag), tag, 1, buffer(&core, 512, (tag + round) as u8)))
                .collect();
            let done = finish(&core, &mut namespace, batch).await;
            assert!(done.iter().all(|completion| completion.status().is_success()));
        }
        for (block, bytes) in device.namespace_data(1).chunks(512).take(20).enumerate() {
            assert!(bytes.iter().all(|byte| *byte == (block + 99) as u8), "block {block}");
        }
    });
}

#[test]
fn external_memory_uses_bounce_buffers() {
    on_device(SimulatedConfig::new(1024, 512), async |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        let region = std::rc::Rc::new(dma::SharedRegion::new(1 << 20).unwrap());
        region.write(4096, &pattern(1, 2048));
        let external = core.pool().attach_external(region.clone());
        let write = Request::write(Tag(0), 0, 4, external.buffer(4096, 2048).unwrap());
        assert_eq!(status(&core, &mut namespace, write).await, Status::SUCCESS);
        assert_eq!(&device.namespace_data(1)[..2048], pattern(1, 2048));
        let read = Request::read(Tag(0), 0, 4, external.buffer(65536, 2048).unwrap());
        assert_eq!(status(&core, &mut namespace, read).await, Status::SUCCESS);
        let mut back = vec![0; 2048];
        region.read(65536, &mut back);
        assert_eq!(back, pattern(1, 2048));
    });
}

#[test]
fn injected_faults_apply_count_times() {
    on_device(SimulatedConfig::new(1024, 512), async |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        let fault = CompletionFault::Status(Status::WRITE_FAULT);
        assert!(namespace.queue_pair().unwrap().inject(CompletionInjection { opcode: 1, count: 2, fault }));
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
fn dropped_queue_pairs_are_deleted_and_their_identifiers_reused() {
    let mut config = SimulatedConfig::new(1024, 512);
    config.queues = 2;
    on_device(config, async |core, device| {
        let controller = attach(&core, &device).await;
        assert_eq!(controller.queues_max(), 2);
        for round in 0..5 {
            let one = controller.qpair(&core, &options()).await.unwrap();
            let mut two = Namespace::of(&controller, &core, 1, &options()).await.unwrap();
            let third = controller.qpair(&core, &options()).await;
            assert!(matches!(third, Err(NvmeOpenError::NoFreeQueue(2))), "round {round}");
            // Dropped with I/O in flight, whose completion has no receiver.
            two.submit(&mut vec![Request::read(Tag(0), 0, 1, buffer(&core, 512, 0))]);
            drop((one, two));
            until(&core, "queues are deleted", || controller.queues_left() == 2).await;
            assert_eq!(device.queues(), 0);
        }
        drop(controller);
        until(&core, "the controller is shut down", || !device.can_access_memory()).await;
    });
}

#[test]
fn a_reused_queue_identifier_starts_with_an_empty_queue() {
    for oacs in [0, oacs::DOORBELL_BUFFER] {
        let mut config = SimulatedConfig::new(1024, 512);
        config.queues = 1;
        config.identity.oacs |= oacs;
        on_device(config, async |core, device| {
            let controller = attach(&core, &device).await;
            for round in 0..3 {
                let mut namespace = Namespace::of(&controller, &core, 1, &options()).await.unwrap();
                // The device steps several times before the first doorbell of the new queue pair.
                core.sleep_ns(1_000_000).await;
                let batch =
                    (0..5).map(|tag| Request::read(Tag(tag), tag, 1, buffer(&core, 512, 0))).collect();
                let done = finish(&core, &mut namespace, batch).await;
                assert!(done.iter().all(|completion| completion.status().is_success()), "round {round}");
                assert_eq!(device.executed(), 5 * (round + 1));
                drop(namespace);
                until(&core, "the queue is deleted", || controller.queues_left() == 1).await;
            }
        });
    }
}

#[test]
fn queue_pairs_on_several_cores_share_a_controller() {
    let device = nvme::testing::SimulatedController::new(SimulatedConfig::new(1 << 16, 512));
    let cpu = os::CpuSet::allowed().cpus()[0];
    let cpus = os::CpuSet::new(vec![cpu, cpu + 1, cpu + 2]).unwrap();
    let config = reactor::ReactorConfig { cpus, ..rig::reactor_config(IdlePolicy::default()) };
    let reactors = reactor::Reactors::start(&config).unwrap();
    let (sender, controllers) = std::sync::mpsc::channel();
    let stepped = device.clone();
    reactors.handles()[0]
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
    for (index, remote) in reactors.handles().iter().enumerate() {
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
    let disk = device.namespace_data(1);
    for index in 0..3 {
        let block = index * 64;
        assert!(disk[block * 512..(block + 16) * 512].iter().all(|byte| *byte == (block + 49) as u8));
    }
    reactors.stop();
    assert!(!device.can_access_memory(), "the last handle shuts the controller down");
}

#[test]
fn an_interrupt_wakes_a_sleeping_core() {
    let reactor = reactor::Reactor::new(&rig::reactor_config(IdlePolicy::Sleep)).unwrap();
    let core = reactor.core();
    let device = nvme::testing::SimulatedController::new(SimulatedConfig::new(1024, 512));
    // The device runs on a thread of its own, because a sleeping core cannot step it.
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (stepped, until) = (device.clone(), stop.clone());
    let thread = std::thread::spawn(move || {
        while !until.load(std::sync::atomic::Ordering::Relaxed) {
            stepped.step();
            std::thread::yield_now();
        }
    });
    reactor.block_on(async move {
        let options = Options { interrupts: InterruptMode::On, io_timeout_ns: 0, ..options() };
        let mut namespace = open(&core, &device, &options).await;
        for round in 0..20 {
            let mut batch = vec![Request::read(Tag(round), 0, 1, buffer(&core, 512, 0))];
            namespace.submit(&mut batch);
            let mut done = Vec::new();
            assert_eq!(namespace.deadline(), None, "the core may sleep");
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
fn admin_passthrough_rejects_queue_management_and_oversized_data() {
    on_device(SimulatedConfig::new(1024, 512), async |core, device| {
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
                "{opcode:#x} is reserved for the driver"
            );
        }
        let long = controller.admin(wire_nvme::Sqe::new(6), AdminData::In(2 << 20)).await;
        assert_eq!(long, Err(nvme::AdminError::InvalidLength(2 << 20)));
    });
}

#[test]
fn opening_over_vfio_user_fails_without_a_shared_arena() {
    let reactor = reactor::Reactor::new(&reactor::ReactorConfig::default()).unwrap();
    let core = reactor.core();
    reactor.block_on(async move {
        let uri = "nvme+vfio-user:/nowhere?ns=1".parse().unwrap();
        let error = Namespace::open(&core, &uri, &options()).await.err().unwrap();
        assert!(matches!(error, NvmeOpenError::MemoryNotShared(_)));
        assert!(error.to_string().contains("shared: true"), "{error}");
        let missing = "nvme+pcie://ffff:ff:1f.7".parse().unwrap();
        let error = Namespace::open(&core, &missing, &options()).await.err().unwrap();
        assert!(error.to_string().contains("ffff:ff:1f.7"), "{error}");
    });
}

#[test]
fn queue_pairs_measure_costs_and_memory() {
    on_device(SimulatedConfig::new(4096, 512), async |core, device| {
        let options = Options { count_costs: true, ..options() };
        let controller = Controller::attach_device(&core, device.device(), &options).await.unwrap();
        let mut namespace = Namespace::of(&controller, &core, 1, &options).await.unwrap();
        let batch = (0..64).map(|tag| Request::read(Tag(tag), tag, 1, buffer(&core, 512, 0))).collect();
        finish(&core, &mut namespace, batch).await;
        let pair = namespace.queue_pair().unwrap();
        let costs = pair.costs();
        assert_eq!((costs.submitted, costs.completed), (64, 64));
        assert!(costs.submit_ns > 0 && costs.complete_ns > 0);
        let (host_bytes, device_bytes) = pair.memory_bytes();
        println!("queue pair of depth 128: {host_bytes} bytes host, {device_bytes} bytes device-visible");
        assert!(host_bytes < 32 << 10 && device_bytes <= 40 << 10, "{host_bytes} and {device_bytes}");
        let stats = pair.stats();
        assert!(stats.doorbells <= 2 * stats.batches + stats.polls);
        pair.count_costs(false);
        finish(&core, &mut namespace, vec![Request::new(Tag(0), Op::Flush, 0, 0)]).await;
        assert_eq!(namespace.queue_pair().unwrap().costs().submitted, 64);
    });
}
