//! Properties of random systems: no plan changes a function in use, and every run can be undone from wherever it was
//! interrupted.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::fake::FakeHost;
use super::*;

/// The system as the test built it, independent of what the kernel shows.
#[derive(Debug)]
struct SystemModel {
    functions: Vec<ModelFunction>,
    /// Block devices, each with the devices that it is built on; those of functions first.
    blocks: Vec<ModelBlock>,
    /// Indices of blocks in use.
    used: BTreeSet<usize>,
    /// Indices of blocks with a signature.
    with_signature: BTreeSet<usize>,
}

#[derive(Debug)]
struct ModelFunction {
    address: PciAddress,
    driver: Option<&'static str>,
}

#[derive(Debug)]
struct ModelBlock {
    name: String,
    number: String,
    /// The function, if this is a disk.
    function: Option<usize>,
    below: Vec<usize>,
}

/// Random numbers that describe a system; each is taken modulo the number of choices.
#[derive(Clone, Debug)]
struct Recipe {
    /// Driver, number of disks, partitions per disk.
    functions: Vec<(u8, u8, u8)>,
    /// Kind, and the devices below it.
    stacks: Vec<(u8, Vec<u8>)>,
    /// Block, kind of use.
    uses: Vec<(u8, u8)>,
    signatures: Vec<u8>,
}

fn recipes() -> impl Strategy<Value = Recipe> {
    let functions = proptest::collection::vec((0u8..8, 0u8..3, 0u8..3), 1..5);
    let stacks = proptest::collection::vec((any::<u8>(), proptest::collection::vec(any::<u8>(), 1..4)), 0..4);
    let uses = proptest::collection::vec((any::<u8>(), any::<u8>()), 0..4);
    let signatures = proptest::collection::vec(any::<u8>(), 0..2);
    (functions, stacks, uses, signatures).prop_map(|(functions, stacks, uses, signatures)| Recipe {
        functions,
        stacks,
        uses,
        signatures,
    })
}

fn build(recipe: &Recipe) -> (FakeHost, SystemModel) {
    let fake = FakeHost::default();
    for driver in ["nvme", "vfio-pci", "uio_pci_generic"] {
        fake.driver(driver);
    }
    fake.file("proc/self/mountinfo", "21 1 0:20 / /proc rw - proc proc rw\n");
    fake.file("proc/swaps", "Filename Type Size Used Priority\n");
    fake.file("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "0\n");
    let mut model = SystemModel {
        functions: vec![],
        blocks: vec![],
        used: BTreeSet::new(),
        with_signature: BTreeSet::new(),
    };
    for (index, (driver, disks, partitions)) in recipe.functions.iter().enumerate() {
        let driver = [Some("vfio-pci"), Some("uio_pci_generic"), None].get(usize::from(*driver)).copied();
        build_function(&fake, &mut model, index, driver.unwrap_or(Some("nvme")), *disks, *partitions);
    }
    if model.blocks.is_empty() {
        return (fake, model);
    }
    for (index, (kind, below)) in recipe.stacks.iter().enumerate() {
        build_stack(&fake, &mut model, index, *kind, below);
    }
    for (block, kind) in &recipe.uses {
        use_block(&fake, &mut model, usize::from(*block), kind % 8);
    }
    for block in &recipe.signatures {
        let index = usize::from(*block) % model.blocks.len();
        fake.add_signature(&format!("dev/{}", model.blocks[index].name), 0, b"XFSB");
        model.with_signature.insert(index);
    }
    (fake, model)
}

fn build_function(
    fake: &FakeHost,
    model: &mut SystemModel,
    index: usize,
    driver: Option<&'static str>,
    disks: u8,
    partitions: u8,
) {
    let address = format!("0000:00:{:02x}.0", index + 4);
    fake.function(&address, Some(index as u32));
    if driver == Some("nvme") {
        for disk in 1..=disks {
            let directory = format!("sys/devices/pci0000:00/{address}/nvme/nvme{index}");
            let name = format!("nvme{index}n{disk}");
            let of_disk = model.blocks.len();
            let mut add = |name: String, function, below| {
                let number = format!("259:{}", model.blocks.len());
                model.blocks.push(ModelBlock { name, number: number.clone(), function, below });
                number
            };
            fake.block(&directory, &name, &add(name.clone(), Some(index), vec![]));
            for part in 1..=partitions {
                let part_name = format!("{name}p{part}");
                let number = add(part_name.clone(), None, vec![of_disk]);
                fake.block(&format!("{directory}/{name}"), &part_name, &number);
                fake.file(&format!("{directory}/{name}/{part_name}/partition"), &format!("{part}\n"));
            }
        }
    }
    if let Some(driver) = driver {
        fake.start_bound(&address, driver);
        if driver != "nvme" {
            let real = format!("sys/devices/pci0000:00/{address}");
            fake.file(&format!("{real}/driver_override"), &format!("{driver}\n"));
        }
    }
    model.functions.push(ModelFunction { address: at(&address), driver });
}

/// Adds a device that is built on others. The kernel shows the relation as slaves and holders; the model uses one.
fn build_stack(fake: &FakeHost, model: &mut SystemModel, index: usize, kind: u8, below: &[u8]) {
    let virtual_blocks = "sys/devices/virtual/block";
    let name = format!("{}{index}", ["dm-", "md", "bcache"][usize::from(kind % 3)]);
    let number = format!("25{}:{index}", kind % 3);
    let below: BTreeSet<usize> = below.iter().map(|below| usize::from(*below) % model.blocks.len()).collect();
    fake.block(virtual_blocks, &name, &number);
    if kind.is_multiple_of(3) {
        fake.file(&format!("{virtual_blocks}/{name}/dm/name"), &format!("map{index}\n"));
        fake.link(&format!("dev/mapper/map{index}"), &format!("../{name}"));
    }
    for one in &below {
        let lower = &model.blocks[*one].name;
        if kind & 4 == 0 {
            fake.link(&format!("{virtual_blocks}/{name}/slaves/{lower}"), "x");
        } else {
            let directory = fake.resolve(&format!("sys/class/block/{lower}")).unwrap();
            fake.link(&format!("{directory}/holders/{name}"), "x");
        }
    }
    model.used.extend(&below);
    model.blocks.push(ModelBlock { name, number, function: None, below: below.into_iter().collect() });
}

fn use_block(fake: &FakeHost, model: &mut SystemModel, block: usize, kind: u8) {
    let index = block % model.blocks.len();
    let ModelBlock { name, number, .. } = &model.blocks[index];
    match kind {
        0 => fake
            .append("proc/self/mountinfo", &format!("9 1 {number} / /m rw shared:1 - ext4 /dev/root rw\n")),
        1 => fake.append("proc/self/mountinfo", &format!("9 1 0:99 /s /m rw - btrfs /dev/{name} rw\n")),
        2 => fake.append("proc/swaps", &format!("/dev/{name} partition 8 0 -2\n")),
        3 => fake.link(&format!("sys/fs/btrfs/u-{index}/devices/{name}"), "x"),
        4 => fake.set_busy(&format!("dev/{name}")),
        5 => {
            fake.link(&format!("proc/{}/ns/mnt", index + 100), &format!("mnt:[{index}]"));
            fake.file(
                &format!("proc/{}/mountinfo", index + 100),
                &format!("9 1 {number} / / rw - xfs none rw\n"),
            );
        }
        6 => {
            fake.link(&format!("dev/disk/by-uuid/{index}-u"), &format!("../../{name}"));
            fake.append("etc/fstab", &format!("UUID={index}-u /boot ext4 noauto 0 2\n"));
        }
        _ => fake.append("proc/cmdline", &format!(" root=/dev/{name}")),
    }
    model.used.insert(index);
}

impl SystemModel {
    /// The functions that a block depends on.
    fn functions_below(&self, block: usize) -> BTreeSet<usize> {
        let mut found: BTreeSet<usize> = self.blocks[block].function.into_iter().collect();
        for below in &self.blocks[block].below {
            found.extend(self.functions_below(*below));
        }
        found
    }

    fn addresses_below<'a>(&'a self, blocks: impl IntoIterator<Item = &'a usize>) -> BTreeSet<PciAddress> {
        let functions = blocks.into_iter().flat_map(|block| self.functions_below(*block));
        functions.map(|index| self.functions[index].address).collect()
    }
}

fn requests() -> impl Strategy<Value = BindRequest> {
    let some = || proptest::collection::vec(3u8..9, 0..3);
    let driver = proptest::sample::select(&BindDriver::ALL[..]);
    let hugepages = proptest::option::of(0u64..3);
    (some(), any::<bool>(), driver, some(), some(), any::<bool>(), hugepages).prop_map(
        |(addresses, all, driver, allow, deny, force_signature, hugepages)| {
            let list = |numbers: Vec<u8>| {
                numbers.into_iter().map(|number| PciAddress::new(0, 0, number, 0).unwrap()).collect()
            };
            let (addresses, allow, deny) = (list(addresses), list(allow), list(deny));
            BindRequest { addresses, all, driver, allow, deny, force_signature, hugepages }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// No plan changes a function that anything in use depends on, even with force.
    #[test]
    fn functions_in_use_are_never_planned(recipe in recipes(), request in requests()) {
        let (fake, model) = build(&recipe);
        let plan = planned(&fake, &request);
        let in_use = model.addresses_below(&model.used);
        let with_signature = model.addresses_below(&model.with_signature);
        for change in &plan.changes {
            prop_assert!(!in_use.contains(&change.address), "{} is in use: {plan:?}\n{model:?}", change.address);
            prop_assert!(request.force_signature || !with_signature.contains(&change.address));
            prop_assert!(!request.deny.contains(&change.address));
            prop_assert!(request.allow.is_empty() || request.allow.contains(&change.address));
            prop_assert!(request.all || request.addresses.contains(&change.address));
        }
        prop_assert!(plan.refusals.iter().all(|refusal| !refusal.reasons.is_empty()));
    }

    /// Every function without a reason for refusal is planned, so that refusing everything fails the test.
    #[test]
    fn unused_functions_are_planned(recipe in recipes(), force_signature: bool) {
        let (fake, model) = build(&recipe);
        let plan = planned(&fake, &BindRequest { all: true, force_signature, ..BindRequest::default() });
        let mut refused = model.addresses_below(&model.used);
        if !force_signature {
            // A signature on a stacked device is not on the disk, but then the disk is held.
            refused.extend(model.addresses_below(&model.with_signature));
        }
        for function in &model.functions {
            let expected = match function.driver {
                Some("vfio-pci") => false,
                None => force_signature,
                _ => !refused.contains(&function.address),
            };
            let planned = plan.changes.iter().any(|change| change.address == function.address);
            prop_assert_eq!(planned, expected, "{}: {:?}", function.address, &plan);
        }
    }

    /// After apply and undo, all files have their original contents.
    #[test]
    fn undo_restores_all_files(recipe in recipes(), requests in proptest::collection::vec(requests(), 1..4)) {
        let (fake, _) = build(&recipe);
        let before = fake.tree();
        for request in &requests {
            run(&fake, &planned(&fake, request)).unwrap();
        }
        let plan = undo(&fake, &[]);
        prop_assert!(!plan.is_refused(), "{:?}", plan);
        run(&fake, &plan).unwrap();
        prop_assert_eq!(fake.tree(), before);
    }

    /// A run that was killed after any effect can be undone, also after the undo was killed.
    #[test]
    fn a_run_killed_after_any_effect_can_be_undone(recipe in recipes(), request in requests(), second in 0usize..12) {
        let (uninterrupted, _) = build(&recipe);
        let before = uninterrupted.tree();
        run(&uninterrupted, &planned(&uninterrupted, &request)).unwrap();
        for effects in 0..=uninterrupted.effects() {
            let (fake, _) = build(&recipe);
            let plan = planned(&fake, &request);
            fake.kill_after(Some(effects));
            let _ = run(&fake, &plan);
            fake.kill_after(None);
            let plan = undo(&fake, &[]);
            prop_assert!(!plan.is_refused(), "after {} effects: {:?}", effects, plan);
            fake.kill_after(Some(second));
            let _ = run(&fake, &plan);
            fake.kill_after(None);
            run(&fake, &undo(&fake, &[])).unwrap();
            prop_assert_eq!(fake.tree(), before.clone(), "killed after {} effects", effects);
        }
    }
}
