//! Fits values of a profile to its targets by coordinate descent.
//!
//! `cargo run --release -p ringbolt-device-model --example tune -- FILE KEY…`, where a key is a path such
//! as `read.path_us.0.us` or `media.dies`. Prints each improvement, and the final values.
#![forbid(unsafe_code)]

use device_model::{DeviceProfile, FitEffort, fit};
use toml::{Table, Value};

/// Rounds over all keys; a round without improvement halves the step.
const ROUNDS: u32 = 12;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().unwrap_or_default();
    let keys: Vec<String> = arguments.collect();
    let text = match std::fs::read_to_string(&file) {
        Ok(text) => text,
        Err(error) => return eprintln!("{file}: {error}"),
    };
    let mut table: Table = match text.parse() {
        Ok(table) => table,
        Err(error) => return eprintln!("{file}: {error}"),
    };
    let Some(mut best) = loss(&table) else { return eprintln!("{file} is not a profile") };
    println!("loss {best:.3}");
    let mut step = 0.08;
    for _ in 0..ROUNDS {
        let before = best;
        for key in &keys {
            for factor in [1.0 + step, 1.0 / (1.0 + step)] {
                let mut tried = table.clone();
                let Some(value) = value_at(&mut tried, key) else { return eprintln!("{key} is no number") };
                *value = match value {
                    Value::Integer(number) => {
                        let moved = *number as f64 * factor;
                        Value::Integer(if factor > 1.0 { moved.ceil() } else { moved.floor() } as i64)
                    }
                    Value::Float(number) => Value::Float((*number * factor * 1e4).round() / 1e4),
                    other => return eprintln!("{key} is {other}"),
                };
                if let Some(found) = loss(&tried)
                    && found < best
                {
                    best = found;
                    table = tried;
                    println!("loss {best:.3}  {key}");
                    break;
                }
            }
        }
        if best > before * 0.999 {
            step /= 2.0;
        }
    }
    for key in &keys {
        if let Some(value) = value_at(&mut table, key) {
            println!("{key} = {value}");
        }
    }
}

fn value_at<'a>(table: &'a mut Table, key: &str) -> Option<&'a mut Value> {
    let mut parts = key.split('.');
    let mut value = table.get_mut(parts.next()?)?;
    for part in parts {
        value = match value {
            Value::Array(array) => array.get_mut(part.parse::<usize>().ok()?)?,
            Value::Table(table) => table.get_mut(part)?,
            _ => return None,
        };
    }
    Some(value)
}

/// Mean robust (Cauchy) loss of the errors in percent, so that one outlier does not dominate.
fn loss(table: &Table) -> Option<f64> {
    let profile = DeviceProfile::parse(&table.to_string()).ok()?;
    let report = fit(&profile, &FitEffort::QUICK, 1);
    let one = |error: f64| (1.0 + (error / 5.0).powi(2)).ln();
    let sum: f64 = report.rows.iter().map(|row| one(row.error_percent)).sum();
    Some(sum / report.rows.len().max(1) as f64)
}
