use super::*;
use crate::Address;

mod fake;
mod properties;

use fake::Fake;

const ONE: &str = "0000:00:04.0";
const TWO: &str = "0000:00:05.0";

fn at(text: &str) -> Address {
    text.parse().unwrap()
}

/// Two controllers with a disk of two partitions each, bound to nvme.
fn machine() -> Fake {
    let fake = Fake::default();
    for driver in ["nvme", "vfio-pci", "uio_pci_generic"] {
        fake.driver(driver);
    }
    for (index, address) in [ONE, TWO].into_iter().enumerate() {
        fake.function(address, Some(index as u32));
        let folder = format!("sys/devices/pci0000:00/{address}/nvme/nvme{index}");
        fake.block(&folder, &format!("nvme{index}n1"), &format!("259:{}", index * 10));
        for part in 1..3 {
            let (disk, name) = (format!("{folder}/nvme{index}n1"), format!("nvme{index}n1p{part}"));
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

fn wants(addresses: &[&str]) -> Request {
    Request { addresses: addresses.iter().map(|text| at(text)).collect(), ..Request::default() }
}

fn planned(fake: &Fake, request: &Request) -> Plan {
    plan(&Snapshot::read(fake, &request.addresses), request)
}

/// Why the first controller is refused, in words.
fn why(fake: &Fake) -> String {
    let plan = planned(fake, &wants(&[ONE]));
    assert_eq!(plan.changes, []);
    let [refusal] = &plan.refusals[..] else { panic!("{plan:?}") };
    refusal.reasons.iter().map(Reason::to_string).collect::<Vec<_>>().join("; ")
}

fn run(fake: &Fake, plan: &Plan) -> Result<Vec<String>, ApplyError> {
    let mut told = Vec::new();
    apply(fake, JOURNAL, plan, &mut |address, effect| {
        told.push(address.map_or_else(|| effect.to_string(), |address| format!("{address} {effect}")));
    })?;
    Ok(told)
}

fn undo(fake: &Fake, addresses: &[Address]) -> Plan {
    let journal = Journal::load(fake, JOURNAL).unwrap();
    let besides: Vec<Address> = journal.functions.keys().copied().collect();
    plan_undo(&Snapshot::read(fake, &besides), &journal, addresses)
}

#[test]
fn a_free_disk_is_bound_and_given_back() {
    let fake = machine();
    let before = fake.tree();
    let plan = planned(&fake, &Request { hugepages: Some(512), ..wants(&[ONE]) });
    assert_eq!(plan.changes[0].disks, ["nvme0n1", "nvme0n1p1", "nvme0n1p2"]);
    let told = run(&fake, &plan).unwrap();
    assert_eq!(
        told,
        [
            "hugepages of 2 MiB: 3 -> 512",
            "0000:00:04.0 driver_override = vfio-pci",
            "0000:00:04.0 unbind from nvme",
            "0000:00:04.0 bind to vfio-pci"
        ]
    );
    let journal = "ringbolt-bind 1\nfunction 0000:00:04.0 nvme -\nhugepages 3 512\nend\n";
    assert_eq!(fake.read(JOURNAL).unwrap(), journal);
    let again = planned(&fake, &wants(&[ONE]));
    assert_eq!((again.unchanged, again.changes.len()), (vec![at(ONE)], 0));
    run(&fake, &undo(&fake, &[])).unwrap();
    assert_eq!(fake.tree(), before);
}

#[test]
fn another_driver_is_taken_without_losing_the_way_back() {
    let fake = machine();
    let before = fake.tree();
    run(&fake, &planned(&fake, &wants(&[ONE, TWO]))).unwrap();
    run(&fake, &planned(&fake, &Request { driver: Driver::UioPciGeneric, ..wants(&[ONE]) })).unwrap();
    assert_eq!(Snapshot::read(&fake, &[]).candidates[0].binding.driver.as_deref(), Some("uio_pci_generic"));
    run(&fake, &undo(&fake, &[at(TWO)])).unwrap();
    assert_eq!(fake.read(JOURNAL).unwrap(), "ringbolt-bind 1\nfunction 0000:00:04.0 nvme -\nend\n");
    // Giving it back by name is as good as undoing it.
    run(&fake, &planned(&fake, &Request { driver: Driver::Nvme, ..wants(&[ONE]) })).unwrap();
    assert_eq!(fake.tree(), before);
}

#[test]
fn what_is_mounted_is_refused_wherever_it_is_mounted() {
    let fake = machine();
    fake.append("proc/self/mountinfo", "30 1 259:1 / /data\\040here rw - ext4 /dev/nvme0n1p1 rw\n");
    assert_eq!(why(&fake), "nvme0n1p1 is mounted at /data here");

    let fake = machine();
    fake.file("proc/77/mountinfo", "30 1 259:0 / /c rw - xfs /dev/nvme0n1 rw\n");
    fake.link("proc/77/ns/mnt", "mnt:[4026532281]");
    assert_eq!(why(&fake), "nvme0n1 is mounted at /c in the namespace of process 77");

    // btrfs: a number of its own, named by its first device, made of two.
    let fake = machine();
    fake.append("proc/self/mountinfo", "30 1 0:41 /sub /data rw - btrfs /dev/nvme1n1p1 rw\n");
    fake.link("sys/fs/btrfs/a-b-c/devices/nvme0n1p2", "../../../../class/block/nvme0n1p2");
    fake.link("sys/fs/btrfs/a-b-c/devices/nvme1n1p1", "../../../../class/block/nvme1n1p1");
    assert_eq!(why(&fake), "nvme0n1p2 is mounted at btrfs a-b-c");
    assert_eq!(planned(&fake, &wants(&[TWO])).changes, []);
}

#[test]
fn what_stands_on_a_disk_is_followed_to_the_top() {
    let fake = machine();
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
        let plan = planned(&fake, &Request { force_signature: true, ..wants(&[address]) });
        assert_eq!(plan.changes, [], "{address}");
    }
    assert_eq!(
        why(&fake),
        "nvme0n1p2 is held by md0 (MD array, raid1); md0 is held by dm-0 (LVM volume vg-root); dm-0 is needed \
         to boot: / is mounted from it (through nvme0n1, nvme0n1p2, md0)"
    );
}

#[test]
fn swap_boot_and_exclusive_use_are_refused() {
    let fake = machine();
    fake.append("proc/swaps", "/dev/nvme0n1p2 partition 1000 0 -2\n");
    assert_eq!(why(&fake), "nvme0n1p2 is swapped to");

    let fake = machine();
    fake.file("proc/cmdline", "quiet root=PARTUUID=12-34 resume=/dev/nvme0n1p2\n");
    fake.link("dev/disk/by-partuuid/12-34", "../../nvme1n1p1");
    assert!(why(&fake).contains("nvme0n1p2 is needed to boot: the kernel's command line has resume= of it"));
    assert_eq!(planned(&fake, &wants(&[TWO])).changes, []);

    let fake = machine();
    fake.file(
        "etc/fstab",
        "# comment\nUUID=AB-CD /boot/efi vfat noauto 0 1\n/dev/nvme1n1p1 /data ext4 noauto 0 0\n",
    );
    fake.link("dev/disk/by-uuid/AB-CD", "../../nvme0n1p1");
    assert_eq!(why(&fake), "nvme0n1p1 is needed to boot: /etc/fstab mounts it at /boot/efi");
    assert_eq!(planned(&fake, &wants(&[TWO])).changes.len(), 1);

    let fake = machine();
    fake.set_busy("dev/nvme0n1p1");
    assert_eq!(why(&fake), "nvme0n1p1 is open exclusively (O_EXCL)");
}

#[test]
fn only_what_is_written_on_a_disk_can_be_overridden() {
    let fake = machine();
    fake.mark("dev/nvme0n1p1", 0, b"XFSB");
    fake.mark("dev/nvme0n1", 512, b"EFI PART");
    assert_eq!(
        why(&fake),
        "nvme0n1 has the mark of a GPT partition table; nvme0n1p1 has the mark of a xfs file system"
    );
    let forced = Request { force_signature: true, ..wants(&[ONE]) };
    assert_eq!(planned(&fake, &forced).changes.len(), 1);
    fake.append("proc/self/mountinfo", "30 1 259:1 / /mnt rw - xfs /dev/nvme0n1p1 rw\n");
    let plan = planned(&fake, &forced);
    assert_eq!((plan.changes.len(), plan.refusals[0].reasons.len()), (0, 1));
}

#[test]
fn a_multipath_disk_is_seen_through_each_of_its_paths() {
    let fake = machine();
    let subsystem = "sys/devices/virtual/nvme-subsystem/nvme-subsys0";
    fake.link("sys/class/nvme-subsystem/nvme-subsys0", "../../devices/virtual/nvme-subsystem/nvme-subsys0");
    fake.link(&format!("{subsystem}/nvme1"), "../../../pci0000:00/0000:00:05.0/nvme/nvme1");
    fake.block(subsystem, "nvme7n1", "259:70");
    fake.append("proc/self/mountinfo", "30 1 259:70 / /data rw - xfs /dev/nvme7n1 rw\n");
    assert_eq!(planned(&fake, &wants(&[TWO])).changes, []);
    assert_eq!(planned(&fake, &wants(&[ONE])).changes.len(), 1);
}

#[test]
fn a_loop_device_over_a_disk_holds_it() {
    let fake = machine();
    fake.block("sys/devices/virtual/block", "loop3", "7:3");
    fake.file("sys/devices/virtual/block/loop3/loop/backing_file", "/dev/nvme0n1p2\n");
    assert_eq!(why(&fake), "nvme0n1p2 is held by loop3 (loop device)");
}

#[test]
fn lists_of_functions_are_obeyed() {
    let fake = machine();
    let all = Request { all: true, ..Request::default() };
    assert_eq!(planned(&fake, &all).changes.len(), 2);
    let denied = planned(&fake, &Request { deny: vec![at(ONE)], ..all.clone() });
    assert_eq!((denied.changes[0].address, denied.is_refused()), (at(TWO), false));
    let allowed = planned(&fake, &Request { allow: vec![at(ONE)], ..all });
    assert_eq!((allowed.changes[0].address, allowed.changes.len()), (at(ONE), 1));
    let named = planned(&fake, &Request { deny: vec![at(ONE)], ..wants(&[ONE, TWO]) });
    assert!(named.is_refused());
    assert_eq!(why_of(&planned(&fake, &wants(&["0000:00:09.0"]))), "there is no such PCI function");
}

fn why_of(plan: &Plan) -> String {
    plan.refusals[0].reasons[0].to_string()
}

#[test]
fn what_vfio_needs_is_asked_for_before_anything_is_done() {
    let fake = machine();
    fake.function("0000:00:06.0", None);
    fake.start_bound("0000:00:06.0", "nvme");
    assert!(why_of(&planned(&fake, &wants(&["0000:00:06.0"]))).contains("behind no IOMMU"));
    fake.file("sys/module/vfio/parameters/enable_unsafe_noiommu_mode", "Y\n");
    assert_eq!(planned(&fake, &wants(&["0000:00:06.0"])).changes.len(), 1);

    // Another function of the group, with a driver, that stays where it is; a bridge does not matter.
    let fake = machine();
    for (address, class, driver) in
        [("0000:00:04.1", "0x020000\n", "virtio"), ("0000:00:04.2", "0x060400\n", "port")]
    {
        fake.driver(driver);
        fake.function(address, Some(0));
        fake.file(&format!("sys/devices/pci0000:00/{address}/class"), class);
        fake.start_bound(address, driver);
    }
    assert_eq!(why(&fake), "its IOMMU group 0 is shared with 0000:00:04.1, which virtio has");
    assert_eq!(
        why_of(&planned(&fake, &wants(&["0000:00:04.1"]))),
        "it is no NVMe controller (class 0x020000)"
    );
    let uio = Request { driver: Driver::UioPciGeneric, ..wants(&[ONE]) };
    assert_eq!(planned(&fake, &uio).changes.len(), 1);

    let fake = Fake::default();
    fake.function(ONE, Some(0));
    fake.driver("nvme");
    fake.start_bound(ONE, "nvme");
    assert_eq!(
        why_of(&planned(&fake, &wants(&[ONE]))),
        "the driver vfio-pci is not loaded: modprobe vfio_pci"
    );
}

#[test]
fn a_function_that_a_program_has_open_is_left_to_it() {
    let fake = machine();
    run(&fake, &planned(&fake, &wants(&[ONE]))).unwrap();
    fake.set_busy("dev/vfio/0");
    let back = planned(&fake, &Request { driver: Driver::Nvme, ..wants(&[ONE]) });
    assert_eq!(why_of(&back), "a program has it open (/dev/vfio/0)");
    assert!(undo(&fake, &[]).is_refused());

    // A node that anybody may open: the descriptor tells.
    let fake = machine();
    run(&fake, &planned(&fake, &wants(&[ONE]))).unwrap();
    fake.file("sys/devices/pci0000:00/0000:00:04.0/vfio-dev/vfio7/dev", "511:7\n");
    fake.file("dev/vfio/devices/vfio7", "");
    assert!(!undo(&fake, &[]).is_refused());
    fake.link("proc/77/fd/5", "../../../dev/vfio/devices/vfio7");
    assert_eq!(why_of(&undo(&fake, &[])), "a program has it open (/dev/vfio/devices/vfio7, process 77)");
}

#[test]
fn undoing_does_not_take_a_disk_that_was_mounted_since() {
    let fake = machine();
    let unplugged = planned(&fake, &wants(&[ONE]));
    run(&fake, &unplugged).unwrap();
    // The journal now wants vfio-pci back; the kernel has it, and a file system is mounted.
    fake.file(JOURNAL, "ringbolt-bind 1\nfunction 0000:00:04.0 vfio-pci vfio-pci\nend\n");
    run(&fake, &planned(&fake, &Request { driver: Driver::Nvme, ..wants(&[ONE]) })).unwrap();
    assert_eq!(undo(&fake, &[]).changes.len(), 1);
    fake.append("proc/self/mountinfo", "30 1 259:1 / /mnt rw - xfs /dev/nvme0n1p1 rw\n");
    let plan = undo(&fake, &[]);
    assert!(plan.is_refused() && plan.changes.is_empty(), "{plan:?}");
}

#[test]
fn a_disk_that_is_taken_after_the_plan_is_noticed() {
    let fake = machine();
    let before = fake.tree();
    let plan = planned(&fake, &wants(&[ONE]));
    fake.set_busy("dev/nvme0n1");
    let error = run(&fake, &plan).unwrap_err().to_string();
    assert!(error.contains("the use of its disks") && error.contains("nothing was done"), "{error}");
    assert_eq!(fake.tree(), before);

    let plan = planned(&fake, &wants(&[TWO]));
    run(&fake, &plan).unwrap();
    assert!(matches!(run(&fake, &plan), Err(ApplyError::Changed { .. })));
}

#[test]
fn a_driver_that_refuses_leaves_everything_as_it_was() {
    let fake = machine();
    let before = fake.tree();
    let plan = planned(&fake, &wants(&[ONE]));
    fake.break_driver("vfio-pci");
    let error = run(&fake, &plan).unwrap_err().to_string();
    assert!(error.contains("bind to vfio-pci") && error.contains("it is as it was"), "{error}");
    assert_eq!(fake.tree(), before);
}

#[test]
fn hugepages_that_the_kernel_has_not_are_reported_and_given_back() {
    let fake = machine();
    let before = fake.tree();
    let plan = planned(&fake, &Request { hugepages: Some(5000), ..Request::default() });
    let error = run(&fake, &plan).unwrap_err().to_string();
    assert!(error.contains("5000 of 2 MiB were asked for") && error.contains("1000"), "{error}");
    run(&fake, &undo(&fake, &[])).unwrap();
    assert_eq!(fake.tree(), before);
    assert_eq!(planned(&fake, &Request { hugepages: Some(2), ..Request::default() }).hugepages, None);
}

#[test]
fn hugepages_come_back_when_undoing_was_killed() {
    let fake = machine();
    let before = fake.tree();
    run(&fake, &planned(&fake, &Request { hugepages: Some(8), ..Request::default() })).unwrap();
    // After it was written down, and before it was done.
    let plan = undo(&fake, &[]);
    fake.die_after(Some(1));
    run(&fake, &plan).unwrap_err();
    fake.die_after(None);
    run(&fake, &undo(&fake, &[])).unwrap();
    assert_eq!(fake.tree(), before);
}

#[test]
fn hugepages_that_somebody_else_set_are_left() {
    let fake = machine();
    run(&fake, &planned(&fake, &Request { hugepages: Some(8), ..Request::default() })).unwrap();
    fake.file("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "20\n");
    assert_eq!(undo(&fake, &[]).hugepages, None);
}

#[test]
fn a_function_that_is_gone_is_forgotten() {
    let fake = machine();
    run(&fake, &planned(&fake, &wants(&[ONE]))).unwrap();
    fake.file(JOURNAL, "ringbolt-bind 1\nfunction 0000:00:0a.0 nvme -\nend\n");
    let plan = undo(&fake, &[]);
    assert!(!plan.is_refused());
    run(&fake, &plan).unwrap();
    assert!(fake.read(JOURNAL).is_err());
}
