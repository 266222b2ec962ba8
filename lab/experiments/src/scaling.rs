//! Adapts a cell to fewer devices than the study used.
//!
//! Only experiments with a fixed number of devices are scaled. If the number of devices is an axis of the figure,
//! cells that fit are measured, and the others are skipped.

use crate::definition::{ExperimentDefinition, Scale};
use crate::record::{CellParameters, ParameterValue};

/// Queue depths that shrink in proportion to the number of devices.
const DEPTH_PARAMETERS: [&str; 2] = ["iodepth", "background_iodepth"];

/// Reduces a cell's devices to those available. Returns a sentence that describes the change, or `None` if nothing
/// had to be changed or the cell must not be.
///
/// Applications interfere by the I/O that they have in flight on a device. The studies spread each application over
/// all devices, so with fewer of them its depth shrinks in proportion, while the number of applications, which these
/// figures vary, stays. An application without neighbours measures the CPU and keeps its depth: with less in flight,
/// the CPU would idle.
pub(crate) fn scale_to_devices(
    definition: &ExperimentDefinition,
    cell: &mut CellParameters,
    scale: Scale,
    available: usize,
) -> Option<String> {
    let published = requested_devices(cell);
    if scale == Scale::Paper || published <= available || available == 0 || definition.varies("devices") {
        return None;
    }
    cell.insert("devices".into(), ParameterValue::Integer(available as i64));
    let instead =
        format!("{available} {} instead of {published}", if available == 1 { "device" } else { "devices" });
    if !cell.contains_key("background") {
        return Some(format!("{instead}: the device may be the bottleneck instead of the CPU"));
    }
    let mut changed = Vec::new();
    for name in DEPTH_PARAMETERS {
        let Some(depth) = cell.get(name).and_then(ParameterValue::as_f64).filter(|depth| *depth > 1.0) else {
            continue;
        };
        // A varied depth is an axis of the figure.
        if definition.varies(name) {
            continue;
        }
        let scaled = (depth * available as f64 / published as f64).round().max(1.0);
        cell.insert(name.into(), ParameterValue::Integer(scaled as i64));
        changed.push(format!("{name} {scaled} instead of {depth}"));
    }
    match changed.is_empty() {
        true => Some(format!("{instead}: I/O that was spread over them is concentrated here")),
        false => Some(format!(
            "{instead}, with {}: as much in flight on each device as published",
            changed.join(" and ")
        )),
    }
}

/// Number of devices that a cell uses.
pub(crate) fn requested_devices(cell: &CellParameters) -> usize {
    cell.get("devices").and_then(ParameterValue::as_f64).map_or(1, |count| (count as usize).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(id: &str, scale: Scale, available: usize) -> (CellParameters, Option<String>) {
        let catalog = crate::ExperimentCatalog::built_in();
        let definition = catalog.get(id).unwrap();
        let mut cell = definition.cells(scale).unwrap().pop().unwrap();
        let message = scale_to_devices(definition, &mut cell, scale, available);
        (cell, message)
    }

    fn number(cell: &CellParameters, name: &str) -> f64 {
        cell[name].as_f64().unwrap()
    }

    #[test]
    fn interfering_applications_keep_their_depth_per_device() {
        let (alone, message) = cell("icpe24.fig12a", Scale::Quick, 1);
        assert_eq!((number(&alone, "devices"), number(&alone, "iodepth")), (1.0, 16.0));
        assert_eq!(number(&alone, "background_iodepth"), 16.0);
        let message = message.unwrap();
        assert!(message.starts_with("1 device instead of 8, with iodepth 16 instead of 128"), "{message}");
        let (three, _) = cell("icpe24.fig11a", Scale::Default, 3);
        assert_eq!((number(&three, "iodepth"), number(&three, "background_iodepth")), (1.0, 48.0));
    }

    #[test]
    fn cpu_experiments_keep_their_depth() {
        let (table, message) = cell("cheops23.table2", Scale::Quick, 2);
        assert_eq!((number(&table, "devices"), number(&table, "iodepth")), (2.0, 128.0));
        assert!(message.unwrap().contains("2 devices instead of 7"));
    }

    #[test]
    fn paper_scale_and_varied_devices_are_not_scaled() {
        for (id, scale, available) in [
            ("icpe24.fig11a", Scale::Paper, 1),
            ("icpe24.fig9", Scale::Quick, 1),
            ("icpe24.fig11a", Scale::Quick, 8),
            ("icpe24.fig2", Scale::Quick, 1),
        ] {
            let catalog = crate::ExperimentCatalog::built_in();
            let before = catalog.get(id).unwrap().cells(scale).unwrap().pop().unwrap();
            assert_eq!(cell(id, scale, available), (before, None), "{id}");
        }
    }
}
