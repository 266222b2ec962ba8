//! Prints the error of a profile for each of its targets: `cargo run --release --example fit -- NAME|FILE [quick]`.
#![forbid(unsafe_code)]

use device_model::{DeviceProfile, FitEffort, fit};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().unwrap_or_else(|| "samsung-980-pro".to_string());
    let text = std::fs::read_to_string(&name).ok();
    let profile = text.map_or_else(|| DeviceProfile::shipped(&name), |text| DeviceProfile::parse(&text));
    let profile = match profile {
        Ok(profile) => profile,
        Err(error) => return eprintln!("{name}: {error}"),
    };
    let effort = if arguments.next().is_some() { FitEffort::QUICK } else { FitEffort::FULL };
    let report = fit(&profile, &effort, 1);
    for row in &report.rows {
        let t = &row.target;
        println!(
            "{:<10} {:>6} qd {:>4} x{} {:<8} {:>12.1} {:>12.1} {:>+8.1} %  {}{}",
            t.rw.name(),
            t.bs,
            t.qd,
            t.devices,
            t.metric.name(),
            t.value,
            row.model,
            row.error_percent,
            if t.beside.is_some() { "beside " } else { "" },
            t.excluded
                .as_ref()
                .map_or(t.source.clone(), |reason| format!("{} (not counted: {reason})", t.source))
        );
    }
    println!(
        "{} of {} met, mean error {:.1} %",
        report.met_count(),
        report.counted().count(),
        report.mean_error_percent()
    );
}
