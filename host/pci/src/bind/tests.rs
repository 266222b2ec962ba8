use super::*;
use crate::PciAddress;

mod fake;
mod properties;

use fake::FakeHost;

const ONE: &str = "0000:00:04.0";
const TWO: &str = "0000:00:05.0";

fn at(text: &str) -> PciAddress {
    text.parse().unwrap()
}

/// Two controllers, bound to nvme, each with a disk of two partitions.
fn two_controllers() -> FakeHost {
    let fake = FakeHost::default();
    for driver in ["nvme", "vfio-pci", "uio_pci_generic"] {
        fake.driver(driver);
    }
    for (index, address) in [ONE, TWO].into_iter().enumerate() {
        fake.function(address, Some(index as u32));
        let directory = format!("sys/devices/pci0000:00/{address}/nvme/nvme{index}");
        fake.block(&directory, &format!("nvme{index}n1"), &format!("259:{}", index * 10));
        for part in 1..3 {
            let (disk, name) = (format!("{directory}/nvme{index}n1"), format!("nvme{index}n1p{part}"));
            fake.block(&disk, &name, &format!("259:{}", index * 10 + part));
            fake.file(&format!("{disk}/{name}/partition"), &format!("{part}\n"));
        }
        fake.start_bound(address, "nvme");
    }
    fake.file("proc/self/mountinfo", "21 1 0:20 / /proc rw - proc proc rw\n");
    fake.file("proc/swaps", "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n");
    fake.file("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "3\n");
    fake
}

fn request_for(addresses: &[&str]) -> BindRequest {
    BindRequest { addresses: addresses.iter().map(|text| at(text)).collect(), ..BindRequest::default() }
}

fn planned(fake: &FakeHost, request: &BindRequest) -> BindPlan {
    plan(&BindSnapshot::read(fake, &request.addresses), request)
}

/// The reasons why the first controller is refused.
fn refusal_text(fake: &FakeHost) -> String {
    let plan = planned(fake, &request_for(&[ONE]));
    assert_eq!(plan.changes, []);
    let [refusal] = &plan.refusals[..] else { panic!("{plan:?}") };
    refusal.reasons.iter().map(RefusalReason::to_string).collect::<Vec<_>>().join("; ")
}

fn run(fake: &FakeHost, plan: &BindPlan) -> Result<Vec<String>, ApplyError> {
    let mut reports = Vec::new();
    apply(fake, JOURNAL_PATH, plan, &mut |address, effect| {
        reports.push(address.map_or_else(|| effect.to_string(), |address| format!("{address} {effect}")));
    })?;
    Ok(reports)
}

fn undo(fake: &FakeHost, addresses: &[PciAddress]) -> BindPlan {
    let journal = BindJournal::load(fake, JOURNAL_PATH).unwrap();
    let others: Vec<PciAddress> = journal.functions.keys().copied().collect();
    plan_undo(&BindSnapshot::read(fake, &others), &journal, addresses)
}

#[test]
fn an_unused_controller_is_bound_and_restored() {
    let fake = two_controllers();
    let before = fake.tree();
    let plan = planned(&fake, &BindRequest { hugepages: Some(512), ..request_for(&[ONE]) });
    assert_eq!(plan.changes[0].disks, ["nvme0n1", "nvme0n1p1", "nvme0n1p2"]);
    let reports = run(&fake, &plan).unwrap();
    assert_eq!(
        reports,
        [
            "hugepages of 2 MiB: 3 -> 512",
            "0000:00:04.0 driver_override = vfio-pci",
            "0000:00:04.0 unbind from nvme",
            "0000:00:04.0 bind to vfio-pci"
        ]
    );
    let journal = "ringbolt-bind 1\nfunction 0000:00:04.0 nvme -\nhugepages 3 512\nend\n";
    assert_eq!(fake.read(JOURNAL_PATH).unwrap(), journal);
    let second = planned(&fake, &request_for(&[ONE]));
    assert_eq!((second.unchanged, second.changes.len()), (vec![at(ONE)], 0));
    run(&fake, &undo(&fake, &[])).unwrap();
    assert_eq!(fake.tree(), before);
}

#[test]
fn rebinding_to_another_driver_keeps_the_original_binding() {
    let fake = two_controllers();
    let before = fake.tree();
    run(&fake, &planned(&fake, &request_for(&[ONE, TWO]))).unwrap();
    run(&fake, &planned(&fake, &BindRequest { driver: BindDriver::UioPciGeneric, ..request_for(&[ONE]) }))
        .unwrap();
    assert_eq!(
        BindSnapshot::read(&fake, &[]).candidates[0].binding.driver.as_deref(),
        Some("uio_pci_generic")
    );
    run(&fake, &undo(&fake, &[at(TWO)])).unwrap();
    assert_eq!(fake.read(JOURNAL_PATH).unwrap(), "ringbolt-bind 1\nfunction 0000:00:04.0 nvme -\nend\n");
    // An explicit bind to the original driver is equivalent to an undo.
    run(&fake, &planned(&fake, &BindRequest { driver: BindDriver::Nvme, ..request_for(&[ONE]) })).unwrap();
    assert_eq!(fake.tree(), before);
}

#[test]
fn mounts_in_every_namespace_are_refused() {
    let fake = two_controllers();
    fake.append("proc/self/mountinfo", "30 1 259:1 / /data\\040here rw - ext4 /dev/nvme0n1p1 rw\n");
    assert_eq!(refusal_text(&fake), "nvme0n1p1 is mounted at /data here");

    let fake = two_controllers();
    fake.file("proc/77/mountinfo", "30 1 259:0 / /c rw - xfs /dev/nvme0n1 rw\n");
    fake.link("proc/77/ns/mnt", "mnt:[4026532281]");
    assert_eq!(refusal_text(&fake), "nvme0n1 is mounted at /c in the namespace of process 77");

    // A btrfs of two devices has its own device number and names only one device as its source.
    let fake = two_controllers();
    fake.append("proc/self/mountinfo", "30 1 0:41 /sub /data rw - btrfs /dev/nvme1n1p1 rw\n");
    fake.link("sys/fs/btrfs/a-b-c/devices/nvme0n1p2", "../../../../class/block/nvme0n1p2");
    fake.link("sys/fs/btrfs/a-b-c/devices/nvme1n1p1", "../../../../class/block/nvme1n1p1");
    assert_eq!(refusal_text(&fake), "nvme0n1p2 is mounted at btrfs a-b-c");
    assert_eq!(planned(&fake, &request_for(&[TWO])).changes, []);
}

#[test]
fn stacked_block_devices_are_followed_to_the_top() {
    let fake = two_controllers();
    fake.block("sys/devices/virtual/block", "md0", "9:0");
    fake.file("sys/devices/virtual/block/md0/md/level", "raid1\n");
    for part in ["nvme0n1p2", "nvme1n1p2"] {
        fake.link(&format!("sys/devices/virtual/block/md0/slaves/{part}"), "x");
    }
    fake.block("sys/devices/virtual/block", "dm-0", "254:0");
    fake.file("sys/devices/virtual/block/dm-0/dm/name", "vg-root\n");
    fake.file("sys/devices/virtual/block/dm-0/dm/uuid", "LVM-abc\n");
    fake.link("sys/devices/virtual/block/md0/holders/dm-0", "x");
    fake.append("proc/self/mountinfo", "30 1 254:0 / / rw - ext4 /dev/mapper/vg-root rw\n");
    for address in [ONE, TWO] {
        let plan = planned(&fake, &BindRequest { force_signature: true, ..request_for(&[address]) });
        assert_eq!(plan.changes, [], "{address}");
    }
    assert_eq!(
        refusal_text(&fake),
        "nvme0n1p2 is held by md0 (MD array, raid1); md0 is held by dm-0 (LVM volume vg-root); dm-0 is needed \
         to boot: / is mounted from it (through nvme0n1, nvme0n1p2, md0)"
    );
}

#[test]
fn swap_boot_and_exclusive_use_are_refused() {
    let fake = two_controllers();
    fake.append("proc/swaps", "/dev/nvme0n1p2 partition 1000 0 -2\n");
    assert_eq!(refusal_text(&fake), "nvme0n1p2 is swapped to");

    let fake = two_controllers();
    fake.file("proc/cmdline", "quiet root=PARTUUID=12-34 resume=/dev/nvme0n1p2\n");
    fake.link("dev/disk/by-partuuid/12-34", "../../nvme1n1p1");
    assert!(
        refusal_text(&fake)
            .contains("nvme0n1p2 is needed to boot: resume= on the kernel's command line refers to it")
    );
    assert_eq!(planned(&fake, &request_for(&[TWO])).changes, []);

    let fake = two_controllers();
    fake.file(
        "etc/fstab",
        "# comment\nUUID=AB-CD /boot/efi vfat noauto 0 1\n/dev/nvme1n1p1 /data ext4 noauto 0 0\n",
    );
    fake.link("dev/disk/by-uuid/AB-CD", "../../nvme0n1p1");
    assert_eq!(refusal_text(&fake), "nvme0n1p1 is needed to boot: /etc/fstab mounts it at /boot/efi");
    assert_eq!(planned(&fake, &request_for(&[TWO])).changes.len(), 1);

    let fake = two_controllers();
    fake.set_busy("dev/nvme0n1p1");
    assert_eq!(refusal_text(&fake), "nvme0n1p1 is open exclusively (O_EXCL)");
}

#[test]
fn only_signatures_can_be_overridden() {
    let fake = two_controllers();
    fake.add_signature("dev/nvme0n1p1", 0, b"XFSB");
    fake.add_signature("dev/nvme0n1", 512, b"EFI PART");
    assert_eq!(
        refusal_text(&fake),
        "nvme0n1 has the mark of a GPT partition table; nvme0n1p1 has the mark of a xfs file system"
    );
    let forced = BindRequest { force_signature: true, ..request_for(&[ONE]) };
    assert_eq!(planned(&fake, &forced).changes.len(), 1);
    fake.append("proc/self/mountinfo", "30 1 259:1 / /mnt rw - xfs /dev/nvme0n1p1 rw\n");
    let plan = planned(&fake, &forced);
    assert_eq!((plan.changes.len(), plan.refusals[0].reasons.len()), (0, 1));
}

#[test]
fn a_multipath_disk_belongs_to_each_of_its_controllers() {
    let fake = two_controllers();
    let subsystem = "sys/devices/virtual/nvme-subsystem/nvme-subsys0";
    fake.link("sys/class/nvme-subsystem/nvme-subsys0", "../../devices/virtual/nvme-subsystem/nvme-subsys0");
    fake.link(&format!("{subsystem}/nvme1"), "../../../pci0000:00/0000:00:05.0/nvme/nvme1");
    fake.block(subsystem, "nvme7n1", "259:70");
    fake.append("proc/self/mountinfo", "30 1 259:70 / /data rw - xfs /dev/nvme7n1 rw\n");
    assert_eq!(planned(&fake, &request_for(&[TWO])).changes, []);
    assert_eq!(planned(&fake, &request_for(&[ONE])).changes.len(), 1);
}

#[test]
fn a_loop_device_on_a_partition_holds_it() {
    let fake = two_controllers();
    fake.block("sys/devices/virtual/block", "loop3", "7:3");
    fake.file("sys/devices/virtual/block/loop3/loop/backing_file", "/dev/nvme0n1p2\n");
    assert_eq!(refusal_text(&fake), "nvme0n1p2 is held by loop3 (loop device)");
}

#[test]
fn allow_and_deny_lists_are_applied() {
    let fake = two_controllers();
    let all = BindRequest { all: true, ..BindRequest::default() };
    assert_eq!(planned(&fake, &all).changes.len(), 2);
    let denied = planned(&fake, &BindRequest { deny: vec![at(ONE)], ..all.clone() });
    assert_eq!((denied.changes[0].address, denied.is_refused()), (at(TWO), false));
    let allowed = planned(&fake, &BindRequest { allow: vec![at(ONE)], ..all });
    assert_eq!((allowed.changes[0].address, allowed.changes.len()), (at(ONE), 1));
    let named = planned(&fake, &BindRequest { deny: vec![at(ONE)], ..request_for(&[ONE, TWO]) });
    assert!(named.is_refused());
    assert_eq!(
        first_refusal(&planned(&fake, &request_for(&["0000:00:09.0"]))),
        "there is no such PCI function"
    );
}

fn first_refusal(plan: &BindPlan) -> String {
    plan.refusals[0].reasons[0].to_string()
}

#[test]
fn missing_vfio_prerequisites_are_refused() {
    let fake = two_controllers();
    fake.function("0000:00:06.0", None);
    fake.start_bound("0000:00:06.0", "nvme");
    assert!(first_refusal(&planned(&fake, &request_for(&["0000:00:06.0"]))).contains("behind no IOMMU"));
    fake.file("sys/module/vfio/parameters/enable_unsafe_noiommu_mode", "Y\n");
    assert_eq!(planned(&fake, &request_for(&["0000:00:06.0"])).changes.len(), 1);

    // Another function of the group is bound to a kernel driver; a bridge does not matter.
    let fake = two_controllers();
    for (address, class, driver) in
        [("0000:00:04.1", "0x020000\n", "virtio"), ("0000:00:04.2", "0x060400\n", "port")]
    {
        fake.driver(driver);
        fake.function(address, Some(0));
        fake.file(&format!("sys/devices/pci0000:00/{address}/class"), class);
        fake.start_bound(address, driver);
    }
    assert_eq!(
        refusal_text(&fake),
        "its IOMMU group 0 is shared with 0000:00:04.1, which is bound to virtio"
    );
    assert_eq!(
        first_refusal(&planned(&fake, &request_for(&["0000:00:04.1"]))),
        "it is no NVMe controller and no I/OAT DMA engine (class 0x020000)"
    );
    let uio = BindRequest { driver: BindDriver::UioPciGeneric, ..request_for(&[ONE]) };
    assert_eq!(planned(&fake, &uio).changes.len(), 1);

    let fake = FakeHost::default();
    fake.function(ONE, Some(0));
    fake.driver("nvme");
    fake.start_bound(ONE, "nvme");
    assert_eq!(
        first_refusal(&planned(&fake, &request_for(&[ONE]))),
        "the driver vfio-pci is not loaded: modprobe vfio_pci"
    );
}

#[test]
fn a_function_that_a_program_has_open_is_refused() {
    let fake = two_controllers();
    run(&fake, &planned(&fake, &request_for(&[ONE]))).unwrap();
    fake.set_busy("dev/vfio/0");
    let back = planned(&fake, &BindRequest { driver: BindDriver::Nvme, ..request_for(&[ONE]) });
    assert_eq!(first_refusal(&back), "a program has it open (/dev/vfio/0)");
    assert!(undo(&fake, &[]).is_refused());

    // A node that can be opened several times: the open descriptor shows its user.
    let fake = two_controllers();
    run(&fake, &planned(&fake, &request_for(&[ONE]))).unwrap();
    fake.file("sys/devices/pci0000:00/0000:00:04.0/vfio-dev/vfio7/dev", "511:7\n");
    fake.file("dev/vfio/devices/vfio7", "");
    assert!(!undo(&fake, &[]).is_refused());
    fake.link("proc/77/fd/5", "../../../dev/vfio/devices/vfio7");
    assert_eq!(
        first_refusal(&undo(&fake, &[])),
        "a program has it open (/dev/vfio/devices/vfio7, process 77)"
    );
}

#[test]
fn undo_refuses_a_disk_that_was_mounted_since() {
    let fake = two_controllers();
    let bound = planned(&fake, &request_for(&[ONE]));
    run(&fake, &bound).unwrap();
    // The journal now says vfio-pci, the function is bound to nvme, and a file system is mounted.
    fake.file(JOURNAL_PATH, "ringbolt-bind 1\nfunction 0000:00:04.0 vfio-pci vfio-pci\nend\n");
    run(&fake, &planned(&fake, &BindRequest { driver: BindDriver::Nvme, ..request_for(&[ONE]) })).unwrap();
    assert_eq!(undo(&fake, &[]).changes.len(), 1);
    fake.append("proc/self/mountinfo", "30 1 259:1 / /mnt rw - xfs /dev/nvme0n1p1 rw\n");
    let plan = undo(&fake, &[]);
    assert!(plan.is_refused() && plan.changes.is_empty(), "{plan:?}");
}

#[test]
fn a_disk_that_is_used_after_planning_is_detected() {
    let fake = two_controllers();
    let before = fake.tree();
    let plan = planned(&fake, &request_for(&[ONE]));
    fake.set_busy("dev/nvme0n1");
    let error = run(&fake, &plan).unwrap_err().to_string();
    assert!(error.contains("the use of its disks") && error.contains("nothing was done"), "{error}");
    assert_eq!(fake.tree(), before);

    let plan = planned(&fake, &request_for(&[TWO]));
    run(&fake, &plan).unwrap();
    assert!(matches!(run(&fake, &plan), Err(ApplyError::Changed { .. })));
}

#[test]
fn a_failed_bind_is_rolled_back() {
    let fake = two_controllers();
    let before = fake.tree();
    let plan = planned(&fake, &request_for(&[ONE]));
    fake.break_driver("vfio-pci");
    let error = run(&fake, &plan).unwrap_err().to_string();
    assert!(
        error.contains("bind to vfio-pci") && error.contains("its original binding is restored"),
        "{error}"
    );
    assert_eq!(fake.tree(), before);
}

#[test]
fn missing_hugepages_are_reported_and_undone() {
    let fake = two_controllers();
    let before = fake.tree();
    let plan = planned(&fake, &BindRequest { hugepages: Some(5000), ..BindRequest::default() });
    let error = run(&fake, &plan).unwrap_err().to_string();
    assert!(error.contains("5000 of 2 MiB were requested") && error.contains("1000"), "{error}");
    run(&fake, &undo(&fake, &[])).unwrap();
    assert_eq!(fake.tree(), before);
    assert_eq!(planned(&fake, &BindRequest { hugepages: Some(2), ..BindRequest::default() }).hugepages, None);
}

#[test]
fn hugepages_are_restored_after_an_interrupted_undo() {
    let fake = two_controllers();
    let before = fake.tree();
    run(&fake, &planned(&fake, &BindRequest { hugepages: Some(8), ..BindRequest::default() })).unwrap();
    // After the journal is written, before hugepages are changed.
    let plan = undo(&fake, &[]);
    fake.kill_after(Some(1));
    run(&fake, &plan).unwrap_err();
    fake.kill_after(None);
    run(&fake, &undo(&fake, &[])).unwrap();
    assert_eq!(fake.tree(), before);
}

#[test]
fn hugepages_changed_by_another_program_are_kept() {
    let fake = two_controllers();
    run(&fake, &planned(&fake, &BindRequest { hugepages: Some(8), ..BindRequest::default() })).unwrap();
    fake.file("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "20\n");
    assert_eq!(undo(&fake, &[]).hugepages, None);
}

#[test]
fn a_removed_function_is_removed_from_the_journal() {
    let fake = two_controllers();
    run(&fake, &planned(&fake, &request_for(&[ONE]))).unwrap();
    fake.file(JOURNAL_PATH, "ringbolt-bind 1\nfunction 0000:00:0a.0 nvme -\nend\n");
    let plan = undo(&fake, &[]);
    assert!(!plan.is_refused());
    run(&fake, &plan).unwrap();
    assert!(fake.read(JOURNAL_PATH).is_err());
}

/// A function of the DMA engine, bound to the kernel's driver, with one channel.
fn with_dma_engine(users: &str) -> FakeHost {
    const DMA: &str = "0000:00:06.0";
    let fake = two_controllers();
    fake.driver("ioatdma");
    fake.function(DMA, Some(7));
    let real = format!("sys/devices/pci0000:00/{DMA}");
    fake.file(&format!("{real}/vendor"), "0x8086\n");
    fake.file(&format!("{real}/device"), "0x2021\n");
    fake.file(&format!("{real}/class"), "0x088000\n");
    fake.start_bound(DMA, "ioatdma");
    fake.file(&format!("{real}/dma/dma0chan0/in_use"), users);
    fake
}

#[test]
fn a_dma_engine_is_bound_by_address_unless_the_kernel_uses_it() {
    let (dma, other) = (&["0000:00:06.0"][..], "the kernel uses its DMA channel dma0chan0 (2 users)");
    let fake = with_dma_engine("0\n");
    let plan = planned(&fake, &request_for(dma));
    assert_eq!((plan.changes.len(), &plan.refusals[..]), (1, &[][..]));
    run(&fake, &plan).unwrap();
    assert_eq!(snapshot::driver(&fake, at(dma[0])).as_deref(), Some("vfio-pci"));
    let journal = BindJournal::load(&fake, JOURNAL_PATH).unwrap();
    let undo = plan_undo(&BindSnapshot::read(&fake, &[at(dma[0])]), &journal, &[]);
    assert_eq!(undo.changes[0].to.driver.as_deref(), Some("ioatdma"));

    let fake = with_dma_engine("2\n");
    assert_eq!(first_refusal(&planned(&fake, &request_for(dma))), other);
    // It is listed, but not one of all controllers, and no NVMe driver drives it.
    let snapshot = BindSnapshot::read(&fake, &[]);
    assert!(snapshot.candidate(at(dma[0])).is_some_and(Candidate::is_ioat));
    let all = planned(&fake, &BindRequest { all: true, ..BindRequest::default() });
    assert!(all.changes.iter().all(|change| change.address != at(dma[0])));
    assert!(all.refusals.iter().all(|refusal| refusal.address != at(dma[0])));
    let fake = with_dma_engine("0\n");
    let nvme = BindRequest { driver: BindDriver::Nvme, ..request_for(dma) };
    assert_eq!(
        first_refusal(&planned(&fake, &nvme)),
        "it is no NVMe controller and no I/OAT DMA engine (class 0x088000)"
    );
}
