//! What a study had and this machine has not: an experiment on fewer devices keeps its meaning.
//!
//! Only an experiment whose number of devices is fixed is scaled. Where it is what the figure is about,
//! the points that fit are measured, and the others say why not.

use crate::definition::{Definition, Scale};
use crate::record::{Parameters, Value};

/// Depths that are divided among the devices.
const DEPTHS: [&str; 2] = ["iodepth", "background_iodepth"];

/// Gives a cell the devices that there are, where it asks for more, and says how that was done. Nothing
/// where it needs no scaling, or must not be scaled.
///
/// Neighbours disturb one another on a device by what they keep in flight there. The studies spread each
/// application over all devices, so with fewer of them its depth shrinks in proportion, and the number of
/// applications, which is what these figures vary, stays. What has no neighbours asks what the processor
/// can do, and keeps its depth: with less in flight, the processor would be idle.
pub(crate) fn to_devices(
    definition: &Definition,
    cell: &mut Parameters,
    scale: Scale,
    here: usize,
) -> Option<String> {
    let published = devices(cell);
    if scale == Scale::Paper || published <= here || here == 0 || definition.varies("devices") {
        return None;
    }
    cell.insert("devices".into(), Value::Integer(here as i64));
    let instead = format!("{here} {} instead of {published}", if here == 1 { "device" } else { "devices" });
    if !cell.contains_key("background") {
        return Some(format!("{instead}: the device may be the limit where the processor was"));
    }
    let mut changed = Vec::new();
    for name in DEPTHS {
        let Some(depth) = cell.get(name).and_then(Value::as_f64).filter(|depth| *depth > 1.0) else {
            continue;
        };
        // What is varied is an axis of the figure, and the published values lie along it.
        if definition.varies(name) {
            continue;
        }
        let scaled = (depth * here as f64 / published as f64).round().max(1.0);
        cell.insert(name.into(), Value::Integer(scaled as i64));
        changed.push(format!("{name} {scaled} instead of {depth}"));
    }
    match changed.is_empty() {
        true => Some(format!("{instead}: what was spread over them meets here")),
        false => Some(format!(
            "{instead}, with {}: as much in flight on each device as published",
            changed.join(" and ")
        )),
    }
}

/// Devices that a cell asks for.
pub(crate) fn devices(cell: &Parameters) -> usize {
    cell.get("devices").and_then(Value::as_f64).map_or(1, |count| (count as usize).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(id: &str, scale: Scale, here: usize) -> (Parameters, Option<String>) {
        let catalog = crate::Catalog::built_in();
        let definition = catalog.get(id).unwrap();
        let mut cell = definition.cells(scale).unwrap().pop().unwrap();
        let said = to_devices(definition, &mut cell, scale, here);
        (cell, said)
    }

    fn number(cell: &Parameters, name: &str) -> f64 {
        cell[name].as_f64().unwrap()
    }

    #[test]
    fn neighbours_keep_as_much_in_flight_on_each_device() {
        let (alone, said) = cell("icpe24.fig12a", Scale::Quick, 1);
        assert_eq!((number(&alone, "devices"), number(&alone, "iodepth")), (1.0, 16.0));
        assert_eq!(number(&alone, "background_iodepth"), 16.0);
        let said = said.unwrap();
        assert!(said.starts_with("1 device instead of 8, with iodepth 16 instead of 128"), "{said}");
        let (three, _) = cell("icpe24.fig11a", Scale::Default, 3);
        assert_eq!((number(&three, "iodepth"), number(&three, "background_iodepth")), (1.0, 48.0));
    }

    #[test]
    fn what_asks_for_the_processor_keeps_its_depth() {
        let (table, said) = cell("cheops23.table2", Scale::Quick, 2);
        assert_eq!((number(&table, "devices"), number(&table, "iodepth")), (2.0, 128.0));
        assert!(said.unwrap().contains("2 devices instead of 7"));
    }

    #[test]
    fn the_papers_scale_and_a_figure_about_devices_are_left_alone() {
        for (id, scale, here) in [
            ("icpe24.fig11a", Scale::Paper, 1),
            ("icpe24.fig9", Scale::Quick, 1),
            ("icpe24.fig11a", Scale::Quick, 8),
            ("icpe24.fig2", Scale::Quick, 1),
        ] {
            let catalog = crate::Catalog::built_in();
            let before = catalog.get(id).unwrap().cells(scale).unwrap().pop().unwrap();
            assert_eq!(cell(id, scale, here), (before, None), "{id}");
        }
    }
}
