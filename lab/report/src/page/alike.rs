//! One line for devices that are alike.

use lab_experiments::PlannedDevice;

use crate::chart::format_number;

/// The measured devices, those of one kind, size and description together.
pub(super) fn targets(devices: &[PlannedDevice]) -> Vec<String> {
    let mut groups: Vec<(&PlannedDevice, Vec<&str>)> = Vec::new();
    for device in devices {
        let alike = |(first, _): &&mut (&PlannedDevice, Vec<&str>)| {
            (&first.kind, first.size_bytes, &first.described)
                == (&device.kind, device.size_bytes, &device.described)
        };
        match groups.iter_mut().find(alike) {
            Some((_, paths)) => paths.push(&device.path),
            None => groups.push((device, vec![&device.path])),
        }
    }
    let line = |(device, paths): &(&PlannedDevice, Vec<&str>)| {
        let count = if paths.len() > 1 { format!("{} × ", paths.len()) } else { String::new() };
        let mut words = format!("{count}{} {}", device.kind, names(paths));
        if device.size_bytes > 0 {
            let each = if paths.len() > 1 { " each" } else { "" };
            words.push_str(&format!(", {}{each}", size(device.size_bytes)));
        }
        if !device.described.is_empty() {
            words.push_str(&format!(", {}", device.described));
        }
        words
    };
    groups.iter().map(line).collect()
}

/// Sentences that begin with a device's name and a colon, those that say the same together. The order is that of the first.
pub(super) fn sentences(all: &[String]) -> Vec<String> {
    let mut groups: Vec<(Vec<&str>, &str)> = Vec::new();
    for sentence in all {
        let (name, rest) = match sentence.split_once(": ") {
            Some((name, rest)) if !name.contains(' ') => (Some(name), rest),
            _ => (None, sentence.as_str()),
        };
        match (name, groups.iter_mut().find(|(names, other)| *other == rest && !names.is_empty())) {
            (Some(name), Some((names, _))) => names.push(name),
            _ => groups.push((name.into_iter().collect(), rest)),
        }
    }
    let whole = |(list, rest): (Vec<&str>, &str)| match list.as_slice() {
        [] => rest.to_string(),
        list => format!("{}: {rest}", names(list)),
    };
    groups.into_iter().map(whole).collect()
}

/// `a, b`; names that count up are a range: `loop0 to loop7`.
fn names(all: &[&str]) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut rest = all;
    while let Some(first) = rest.first() {
        let (stem, number) = numbered(first);
        let follows = |(index, name): &(usize, &&str)| {
            number.is_some_and(|number| numbered(name) == (stem, Some(number + *index as u64)))
        };
        let length = rest.iter().enumerate().take_while(follows).count().max(1);
        match length {
            1 | 2 => parts.extend(rest[..length].iter().map(|name| (*name).to_string())),
            _ => parts.push(format!("{first} to {}", rest[length - 1])),
        }
        rest = &rest[length..];
    }
    parts.join(", ")
}

/// A name without the number at its end, and the number.
fn numbered(name: &str) -> (&str, Option<u64>) {
    let stem = name.trim_end_matches(|letter: char| letter.is_ascii_digit());
    (stem, name[stem.len()..].parse().ok())
}

fn size(bytes: u64) -> String {
    let (unit, name) = if bytes < 1 << 30 { (1 << 20, "MiB") } else { (1 << 30, "GiB") };
    format!("{} {name}", format_number(bytes as f64 / f64::from(unit)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(kind: &str, path: &str, size_bytes: u64) -> PlannedDevice {
        PlannedDevice { kind: kind.into(), path: path.into(), size_bytes, described: "a disk".into() }
    }

    #[test]
    fn devices_that_are_alike_have_one_line() {
        let mut devices: Vec<PlannedDevice> =
            (0..8).map(|number| device("loop", &format!("/dev/loop{number}"), 64 << 20)).collect();
        devices.push(device("block", "/dev/sda", 3 << 29));
        devices.push(device("loop", "/dev/loop9", 64 << 20));
        assert_eq!(
            targets(&devices),
            [
                "9 × loop /dev/loop0 to /dev/loop7, /dev/loop9, 64 MiB each, a disk",
                "block /dev/sda, 1.5 GiB, a disk"
            ]
        );
    }

    #[test]
    fn sentences_that_are_alike_are_one() {
        let all: Vec<String> =
            ["two CPUs: few", "loop0: slow", "loop0: round", "loop1: slow", "sda: slow", "it: is"]
                .map(String::from)
                .into();
        assert_eq!(sentences(&all), ["two CPUs: few", "loop0, loop1, sda: slow", "loop0: round", "it: is"]);
        assert_eq!(sentences(&[]), Vec::<String>::new());
    }

    #[test]
    fn names_that_count_up_are_a_range() {
        assert_eq!(names(&["nvme0n1", "nvme1n1"]), "nvme0n1, nvme1n1");
        assert_eq!(names(&["a1", "a2", "b3", "b4", "b5", "c"]), "a1, a2, b3 to b5, c");
        assert_eq!(names(&["99999999999999999999999"]), "99999999999999999999999");
    }
}
