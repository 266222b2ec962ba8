//! Stores that SPDK wrote are found on devices, and their volumes are what SPDK reported and served.
#![allow(clippy::unwrap_used)]

mod rig;
#[path = "../../blobstore/tests/support/mod.rs"]
mod support;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use blobstore::{BlobId, BlobSegment};
use block_io::{Op, Payload, RequestFlags, Status, Tag};
use control::json::{Value, json};
use random::WyRand;
use rig::{ESNAP_UUID, Program};
use support::{Device, recorded_json};

/// Block size of the device of a recorded store.
fn block_size(image: &str) -> u32 {
    recorded_json(image)["lvstores"][0]["block_size"].as_u64().unwrap() as u32
}

fn by_alias(objects: &[Value], alias: &Value) -> Value {
    let found = objects.iter().find(|object| object["alias"] == *alias || object["aliases"][0] == *alias);
    let mut found = found.cloned().unwrap_or_else(|| panic!("no {alias} in {objects:?}"));
    // Our own.
    found.as_object_mut().map(|object| object.remove("is_read_only"));
    found
}

/// Compares what methods return, and all contents, with what SPDK returned and served.
fn compare(image: &str) {
    let (program, expected) = (Program::start(), recorded_json(image));
    program.add_esnap();
    program.add_read_only("disk", Device::recorded(image), block_size(image));
    let mut stores = program.stores();
    for store in stores.iter_mut().filter_map(Value::as_object_mut) {
        // Our own.
        assert!(
            ["low_space_percent", "is_low_on_space", "is_read_only", "data_checksums"]
                .iter()
                .all(|key| store.remove(*key).is_some())
        );
    }
    assert_eq!(json!(stores), expected["lvstores"], "{image}");
    let (lvols, recorded) = (program.lvols(), expected["lvols"].as_array().unwrap());
    assert_eq!(lvols.len(), recorded.len(), "{image}");
    for lvol in recorded {
        assert_eq!(by_alias(&lvols, &lvol["alias"]), *lvol, "{image}");
    }
    for bdev in expected["bdevs"].as_array().unwrap() {
        let alias = bdev["aliases"][0].as_str().unwrap();
        let found = program.call("bdev_get_bdevs", json!({ "name": alias }))[0].clone();
        for (key, value) in bdev.as_object().unwrap() {
            assert_eq!(found[key], *value, "{image} {alias} {key}");
        }
        assert_eq!((&found["product_name"], &found["claimed"]), (&json!("Logical Volume"), &json!(false)));
        assert_eq!(found["supported_io_types"]["write"], false);
        assert_eq!(program.sha256(alias), expected["sha256"][alias], "{image} {alias}");
    }
    let disk = program.call("bdev_get_bdevs", json!({ "name": "disk" }))[0].clone();
    assert_eq!(disk["claim_type"], "read_many_write_none");
}

#[test]
fn a_store_on_blocks_of_512_bytes_is_what_spdk_reports_and_serves() {
    compare("lvs-512");
}

#[test]
fn a_store_on_blocks_of_4_kib_is_what_spdk_reports_and_serves() {
    // Its external snapshot has blocks of 512 bytes.
    compare("lvs-4k");
}

#[test]
fn stores_of_other_geometries_are_what_spdk_reports_and_serves() {
    for image in ["lvs-c4m", "lvs-md8k", "lvs-grown"] {
        compare(image);
    }
}

#[test]
fn stores_that_were_killed_are_what_spdk_recovers_and_serves() {
    for image in ["lvs-dirty", "lvs-race0", "lvs-race1", "lvs-race2", "lvs-race3", "lvs-race4", "lvs-race5"] {
        compare(image);
    }
}

#[test]
fn a_clone_without_its_external_snapshot_is_degraded_and_whole_when_it_appears() {
    let program = Program::start();
    let (expected, whole) = (recorded_json("lvs-degraded"), recorded_json("lvs-512"));
    program.add("disk", Device::recorded("lvs-512"), 512);
    let has_clone = || program.registry.find("lvs/esclone").is_some();
    let degraded = |expected: &Value| {
        let lvols = program.lvols();
        for lvol in expected["lvols"].as_array().unwrap() {
            assert_eq!(by_alias(&lvols, &lvol["alias"]), *lvol);
        }
    };
    degraded(&expected);
    assert!(!has_clone() && program.registry.find("lvs/thin").is_some());
    program.add_esnap();
    degraded(&whole);
    assert_eq!(program.sha256("lvs/esclone"), whole["sha256"]["lvs/esclone"]);
    let esnap = program.call("bdev_get_bdevs", json!({ "name": ESNAP_UUID }))[0].clone();
    assert_eq!(esnap["claim_type"], "read_many_write_none");
    // It goes, and comes back.
    program.remove("esnap");
    degraded(&expected);
    assert!(!has_clone() && program.registry.find("lvs/thin").is_some());
    // A device of another UUID is no external snapshot.
    program.add("esnap", Device::recorded("esnap"), 512);
    assert!(!has_clone());
    program.remove("esnap");
    program.add_esnap();
    assert!(has_clone());
    degraded(&whole);
}

#[test]
fn an_external_snapshot_of_other_blocks_or_with_a_writer_is_not_used() {
    let program = Program::start();
    let has_clone = || program.registry.find("lvs/esclone").is_some();
    program.add("disk", Device::recorded("lvs-512"), 512);
    program.add_as("esnap", Some(ESNAP_UUID), Device::recorded("esnap"), 4096);
    assert!(!has_clone());
    program.remove("esnap");
    program.call("bdev_set_options", json!({ "bdev_auto_examine": false }));
    program.add_esnap();
    let writer = program.registry.open("esnap", bdev::Access::ReadWrite).unwrap();
    program.call("bdev_examine", json!({ "name": "esnap" }));
    assert!(!has_clone());
    drop(writer);
    program.call("bdev_examine", json!({ "name": "esnap" }));
    assert!(has_clone());
    let refused = program.registry.open("esnap", bdev::Access::ReadWrite).unwrap_err();
    assert!(refused.to_string().contains("logical volume lvs/esclone"), "{refused}");
}

#[test]
fn what_is_beyond_the_end_of_an_external_snapshot_is_zero() {
    let (program, whole) = (Program::start(), Device::recorded("esnap"));
    let mut short = Device::new((3 << 20) + 512);
    for block in 0..short.bytes / 512 {
        let mut bytes = [0; 512];
        whole.read(block * 512, &mut bytes);
        short.write(block * 512, &bytes);
    }
    program.add_as("esnap", Some(ESNAP_UUID), short, 512);
    program.add("disk", Device::recorded("lvs-512"), 512);
    let found = program.content("lvs/esclone").unwrap();
    assert!(found == reference("lvs-512", "esclone", (3 << 20) + 512));
}

#[test]
fn store_and_volumes_go_with_their_device_and_return_with_it() {
    let program = Program::start();
    program.add_esnap();
    program.add("disk", Device::recorded("lvs-512"), 512);
    let volumes = program.registry.list().len() - 2;
    assert_eq!(volumes, 12);
    program.remove("disk");
    assert_eq!((program.stores(), program.lvols()), (vec![], vec![]));
    let left: Vec<String> = program.registry.list().iter().map(|device| device.name().to_string()).collect();
    assert_eq!(left, ["esnap"]);
    assert_eq!(program.registry.claims(), []);
    let params = json!({ "lvs_name": "lvs" });
    assert_eq!(program.try_call("bdev_lvol_get_lvstores", params).unwrap_err().code, -19);
    program.add("other", Device::recorded("lvs-512"), 512);
    assert_eq!(program.stores()[0]["base_bdev"], "other");
    assert_eq!(program.registry.list().len(), 14);
    // A second look changes nothing.
    program.call("bdev_examine", json!({ "name": "other" }));
    assert_eq!((program.stores().len(), program.registry.list().len()), (1, 14));
}

#[test]
fn a_volume_in_use_keeps_the_device_open_until_its_user_closes_it() {
    let program = Program::start();
    let disk = program.add("disk", Device::recorded("lvs-512"), 512);
    disk.answers.store(false, Ordering::Release);
    let volume = program.registry.find("lvs/thick").unwrap();
    let (sender, is_open) = std::sync::mpsc::channel();
    let read =
        program.begin_on(0, "lvs/thick", bdev::Access::ReadOnly, move |core, io, _, bytes| async move {
            let mut request = bdev::Request::new(Tag(0), Op::Read, 0, 1);
            request.set_data(core.pool().take_data(bytes));
            sender.send(()).unwrap();
            io.submit(request).await.status()
        });
    is_open.recv_timeout(Duration::from_secs(60)).unwrap();
    let base = program.registry.unregister("disk").unwrap();
    assert!(volume.is_removed() && !base.wait_closed(Duration::ZERO));
    disk.answers.store(true, Ordering::Release);
    read.recv_timeout(Duration::from_secs(60)).unwrap();
    assert!(base.wait_closed(Duration::from_secs(60)));
}

#[test]
fn a_copy_of_a_store_is_refused_while_the_first_is_there() {
    let program = Program::start();
    program.add("disk", Device::recorded("lvs-512"), 512);
    program.add("copy", Device::recorded("lvs-512"), 512);
    assert_eq!(program.stores().len(), 1);
    assert_eq!(program.stores()[0]["base_bdev"], "disk");
    let copy = program.registry.find("copy").unwrap();
    assert_eq!((copy.claim(), copy.open_count()), (None, 0));
    program.remove("disk");
    program.call("bdev_examine", json!({ "name": "copy" }));
    program.wait();
    assert_eq!(program.stores()[0]["base_bdev"], "copy");
    // Another store of the same name is no copy, and is refused too.
    program.add("named so", Device::recorded("lvs-4k"), 4096);
    assert_eq!(program.stores().len(), 1);
}

#[test]
fn a_load_from_a_device_that_hangs_is_a_job_that_can_be_cancelled() {
    let program = Program::start();
    program.call("bdev_set_options", json!({ "bdev_auto_examine": false }));
    let disk = program.add("disk", Device::recorded("lvs-512"), 512);
    // The examination reads the super block, and the load reads it again.
    disk.reads_left.store(2, Ordering::Release);
    let begin = || program.plane.invoke("bdev_examine", json!({ "name": "disk" }));
    let jobs = || program.call("job_get", json!({}));
    std::thread::scope(|scope| {
        let examination = scope.spawn(begin);
        let end = Instant::now() + Duration::from_secs(60);
        let job = loop {
            assert!(Instant::now() < end);
            let jobs = jobs();
            if jobs[0]["total"].as_u64() > Some(4096) {
                break jobs[0].clone();
            }
            std::thread::yield_now();
        };
        assert_eq!(
            (&job["bdev"], &job["state"], &job["done"]),
            (&json!("disk"), &json!("running"), &json!(4096))
        );
        program.call("job_cancel", json!({ "job": job["job"] }));
        examination.join().unwrap().unwrap();
    });
    assert_eq!((&jobs()[0]["state"], program.stores()), (&json!("cancelled"), vec![]));
    assert_eq!(program.registry.find("disk").unwrap().claim(), None);
    disk.reads_left.store(u64::MAX, Ordering::Release);
    program.wait_unused("disk");
    begin().unwrap();
    assert_eq!((&jobs()[1]["state"], program.stores().len()), (&json!("done"), 1));
    assert_eq!(jobs()[1]["done"], jobs()[1]["total"]);
}

#[test]
fn a_device_with_a_writer_or_owner_is_left_alone() {
    let program = Program::start();
    program.call("bdev_set_options", json!({ "bdev_auto_examine": false }));
    program.add("disk", Device::recorded("lvs-512"), 512);
    let examine = || {
        program.call("bdev_examine", json!({ "name": "disk" }));
        program.stores().len()
    };
    for access in [bdev::Access::ReadWrite, bdev::Access::Exclusive { by: "a test" }] {
        let user = program.registry.open("disk", access).unwrap();
        assert_eq!(examine(), 0);
        drop(user);
    }
    let _reader = program.registry.open("disk", bdev::Access::ReadManyWriteNone { by: "a test" }).unwrap();
    assert_eq!(examine(), 1);
}

#[test]
fn methods_select_stores_by_uuid_or_name() {
    let program = Program::start();
    program.add("disk", Device::recorded("lvs-512"), 512);
    let uuid = program.stores()[0]["uuid"].clone();
    for (method, key, count) in
        [("bdev_lvol_get_lvstores", "uuid", 1), ("bdev_lvol_get_lvols", "lvs_uuid", 12)]
    {
        for (params, expected) in [
            (json!({}), Ok(count)),
            (json!({ key: uuid }), Ok(count)),
            (json!({ "lvs_name": "lvs" }), Ok(count)),
            (json!({ key: uuid, "lvs_name": "lvs" }), Err(-22)),
            (json!({ "lvs_name": "other" }), Err(-19)),
            (json!({ key: "lvs" }), Err(-19)),
            (json!({ key: ESNAP_UUID }), Err(-19)),
            (json!({ key: 7 }), Err(-32602)),
        ] {
            let found = program.try_call(method, params.clone());
            let found = found.map(|found| found.as_array().unwrap().len()).map_err(|error| error.code);
            assert_eq!(found, expected, "{method} {params}");
        }
    }
}

/// The contents of a volume, by the blobstore; of the external snapshot the first bytes are there.
fn reference(image: &str, volume: &str, external_bytes: u64) -> Vec<u8> {
    let (device, external) = (Device::recorded(image), Device::recorded("esnap"));
    let store = device.load(false).unwrap();
    let is_it = |blob: &&blobstore::Blob| blob.xattr_text(b"name").as_deref() == Some(volume);
    let blob = store.blobs().values().find(is_it).unwrap();
    let mut content = Vec::new();
    for piece in store.read(blob.id(), 0, store.blob_bytes(blob)).unwrap() {
        let piece = piece.unwrap();
        let before = content.len();
        device.copy(piece, &external, |data| content.extend_from_slice(data));
        if let BlobSegment::External { offset, .. } = piece {
            let there = external_bytes.saturating_sub(offset).min(piece.length()) as usize;
            content[before + there..].fill(0);
        }
    }
    content
}

#[test]
fn reads_of_any_range_in_flight_together_return_the_data_of_their_blocks() {
    let program = Program::start();
    program.add_esnap();
    program.add("disk", Device::recorded("lvs-512"), 512);
    for volume in ["esclone", "thin", "clone1", "thick"] {
        let expected = reference("lvs-512", volume, u64::MAX);
        let found = program.with_channel(&format!("lvs/{volume}"), move |core, io, blocks, _| async move {
            let mut rng = WyRand::new(7);
            let (sender, results) = std::sync::mpsc::channel();
            for index in 0..60 {
                // Half of them near a boundary of clusters.
                let lba = match index % 2 {
                    0 => rng.below(blocks),
                    _ => (rng.below(blocks / 2048) * 2048 + rng.below(64)).saturating_sub(32),
                };
                let count = (1 + rng.below(1600)).min(blocks - lba);
                let Some(mut buffer) = core.pool().take(count as usize * 512) else { continue };
                buffer.as_mut_slice().fill(0xa5);
                let (io, sender) = (io.clone(), sender.clone());
                core.spawn(async move {
                    let buffer = io.read(lba, buffer).await.unwrap();
                    sender.send((lba, buffer.as_slice().to_vec())).unwrap();
                });
            }
            drop(sender);
            let mut found = Vec::new();
            loop {
                match results.try_recv() {
                    Ok(result) => found.push(result),
                    Err(std::sync::mpsc::TryRecvError::Empty) => core.sleep_ns(10_000).await,
                    Err(std::sync::mpsc::TryRecvError::Disconnected) => return found,
                }
            }
        });
        assert!(found.len() > 30, "{volume}: {}", found.len());
        for (lba, data) in found {
            let start = lba as usize * 512;
            assert!(data == expected[start..start + data.len()], "{volume}: {} bytes at {lba}", data.len());
        }
    }
}

#[test]
fn more_pieces_than_the_table_has_places_for_wait_for_their_turn() {
    let program = Program::start();
    let answers = program.add_with("disk", None, Device::recorded("lvs-512"), 512, 1024, false).answers;
    answers.store(false, Ordering::Release);
    let expected = reference("lvs-512", "thin", u64::MAX);
    // One block on each side of a boundary of clusters where the data changes its place: three places each.
    let device = Device::recorded("lvs-512");
    let store = device.load(false).unwrap();
    let is_it = |blob: &&blobstore::Blob| blob.xattr_text(b"name").as_deref() == Some("thin");
    let blob = store.blobs().values().find(is_it).unwrap().id();
    let is_boundary = |lba: &u64| {
        let mut pieces = store.read(blob, lba * 512, 1024).unwrap().map(Result::unwrap);
        let (first, second) = (pieces.next().unwrap(), pieces.next());
        match (first, second) {
            (BlobSegment::Device { offset, length }, Some(BlobSegment::Device { offset: next, .. })) => {
                offset + length != next
            }
            (first, Some(second)) => std::mem::discriminant(&first) != std::mem::discriminant(&second),
            (_, None) => false,
        }
    };
    let lba = (0..expected.len() as u64 / 512 - 1).find(is_boundary).unwrap();
    let found = program.with_channel("lvs/thin", move |core, io, _, _| async move {
        let (sender, results) = std::sync::mpsc::channel();
        for _ in 0..1000 {
            let buffer = core.pool().take(1024).unwrap();
            let (io, sender) = (io.clone(), sender.clone());
            let task =
                async move { sender.send(io.read(lba, buffer).await.unwrap().as_slice().to_vec()).unwrap() };
            assert!(core.spawn(task));
        }
        // Tasks run in order: all reads are submitted by then.
        assert!(core.spawn(async move { answers.store(true, Ordering::Release) }));
        drop(sender);
        let mut found = Vec::new();
        loop {
            match results.try_recv() {
                Ok(data) => found.push(data),
                Err(std::sync::mpsc::TryRecvError::Empty) => core.sleep_ns(10_000).await,
                Err(std::sync::mpsc::TryRecvError::Disconnected) => return found,
            }
        }
    });
    let start = lba as usize * 512;
    assert!(found.len() == 1000 && found.iter().all(|data| data[..] == expected[start..start + 1024]));
}

#[test]
fn requests_come_back_as_they_were_submitted_and_writes_are_refused_on_a_read_only_device() {
    let program = Program::start();
    program.add_read_only("disk", Device::recorded("lvs-512"), 512);
    program.with_channel("lvs/thin", |core, io, _, _| async move {
        for (lba, blocks) in [(1, 8), (2040, 16)] {
            let mut request =
                bdev::Request::read(Tag(3), lba, blocks, core.pool().take(blocks as usize * 512).unwrap());
            request.flow = 5;
            let completion = io.submit(request).await;
            assert!(completion.status().is_success());
            let request = completion.into_request();
            assert_eq!(
                (request.lba, request.blocks, request.flow, request.flags),
                (lba, blocks, 5, RequestFlags::NONE)
            );
        }
        let error = io.write(0, core.pool().take(512).unwrap()).await.map(drop).map_err(|(status, _)| status);
        let error = error.unwrap_err();
        assert!(!error.is_success() && !error.same_code(Status::INTERNAL_ERROR), "{error:?}");
        assert!(io.unmap(0, 8).await.is_err());
        assert_eq!(io.reset().await, Ok(()));
    });
}

#[test]
fn blocks_are_compared_by_reads_of_the_layer() {
    let program = Program::start();
    program.add("disk", Device::recorded("lvs-512"), 512);
    let expected = reference("lvs-512", "thin", u64::MAX);
    // Within a cluster, and across two.
    for (lba, blocks) in [(1u64, 8u32), (2040, 16)] {
        let content = expected[lba as usize * 512..][..blocks as usize * 512].to_vec();
        let statuses = program.with_channel("lvs/thin", move |core, io, _, _| async move {
            let mut statuses = Vec::new();
            for change in [0, 1] {
                let mut buffer = core.pool().take(content.len()).unwrap();
                buffer.copy_from(0, &content);
                buffer.as_mut_slice()[700] ^= change;
                let mut request = bdev::Request::new(Tag(0), Op::Compare, lba, blocks);
                request.set_data(Some(buffer));
                statuses.push(io.submit(request).await.status());
            }
            statuses
        });
        assert!(statuses[0].is_success() && statuses[1].same_code(Status::COMPARE_FAILURE), "{statuses:?}");
    }
}

#[test]
fn holes_are_those_of_the_maps_of_a_volume_and_its_snapshots() {
    let program = Program::start();
    program.add("disk", Device::recorded("lvs-512"), 512);
    let device = Device::recorded("lvs-512");
    let store = device.load(false).unwrap();
    for volume in ["thin", "resized", "thick", "snap1"] {
        let is_it = |blob: &&blobstore::Blob| blob.xattr_text(b"name").as_deref() == Some(volume);
        let blob = store.blobs().values().find(is_it).unwrap();
        let bytes = store.blob_bytes(blob);
        let is_data = |blob: BlobId, lba: u64| {
            let piece = store.read(blob, lba * 512, 512).unwrap().next().unwrap().unwrap();
            matches!(piece, BlobSegment::Device { .. })
        };
        for lba in [0, 5, 2047, 2048, 4100, bytes / 512 - 1] {
            for op in [Op::SeekData, Op::SeekHole] {
                let blocks = (bytes / 512 - lba) as u32;
                let found = program.with_channel(&format!("lvs/{volume}"), move |_, io, _, _| async move {
                    let completion = io.submit(bdev::Request::new(Tag(0), op, lba, blocks)).await;
                    assert!(completion.status().is_success());
                    match completion.into_request().payload {
                        Payload::Found(found) => found,
                        other => panic!("{other:?}"),
                    }
                });
                let wanted = |lba: &u64| is_data(blob.id(), *lba) == (op == Op::SeekData);
                assert_eq!(found, (lba..bytes / 512).find(wanted), "{volume} {op:?} {lba}");
            }
        }
    }
}
