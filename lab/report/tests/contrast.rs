//! The contrast of the page's colours in light mode, dark mode and print: at least 4.5 for text (WCAG 2.2, 1.4.3).
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

const STYLE: &str = include_str!("../src/page/style.css");
const CONTRAST_MIN: f64 = 4.5;

/// The relative luminance of `#rgb` or `#rrggbb` (WCAG 2.2).
fn luminance(colour: &str) -> f64 {
    let digits = colour.strip_prefix('#').unwrap_or_else(|| panic!("{colour}: not a colour"));
    let wide: String = if digits.len() == 3 {
        digits.chars().flat_map(|digit| [digit, digit]).collect()
    } else {
        digits.to_string()
    };
    assert_eq!(wide.len(), 6, "{colour}");
    let channel = |from: usize| {
        let value = f64::from(u8::from_str_radix(&wide[from..from + 2], 16).unwrap()) / 255.0;
        if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
    };
    0.2126 * channel(0) + 0.7152 * channel(2) + 0.0722 * channel(4)
}

fn contrast(a: &str, b: &str) -> f64 {
    let (a, b) = (luminance(a), luminance(b));
    (a.max(b) + 0.05) / (a.min(b) + 0.05)
}

/// The variables of each `:root` rule, in order: light, dark, print.
fn schemes() -> Vec<BTreeMap<&'static str, &'static str>> {
    let rule = |text: &'static str| {
        let body = text.split_once('}').unwrap().0;
        body.split(';').filter_map(|line| line.trim().strip_prefix("--")?.split_once(':')).collect()
    };
    STYLE.split(":root{").skip(1).map(rule).collect()
}

#[test]
fn text_has_enough_contrast_in_every_mode() {
    let schemes = schemes();
    assert_eq!(schemes.len(), 3, "light, dark and print");
    let mut pairs: Vec<(String, String)> = Vec::new();
    let mut add = |text: &str, grounds: &[&str]| {
        pairs.extend(grounds.iter().map(|ground| (text.to_string(), ground.to_string())));
    };
    add("fg", &["bg", "card", "warn"]);
    add("mute", &["bg", "card", "open-bg", "warn"]);
    add("link", &["bg", "card"]);
    add("yes", &["yes-bg"]);
    add("no", &["no-bg"]);
    add("open", &["open-bg"]);
    for colour in 0..12 {
        add(&format!("c{colour}"), &["card"]);
    }
    let mut weak = Vec::new();
    for (scheme, name) in schemes.iter().zip(["light", "dark", "print"]) {
        for (text, ground) in &pairs {
            let found = contrast(scheme[text.as_str()], scheme[ground.as_str()]);
            if found < CONTRAST_MIN {
                weak.push(format!("{name}: {text} on {ground} {found:.2}"));
            }
        }
    }
    assert!(weak.is_empty(), "{weak:?}");
}

#[test]
fn the_contrast_is_that_of_the_definition() {
    assert!((contrast("#000", "#ffffff") - 21.0).abs() < 1e-9);
    assert!((contrast("#777777", "#fff") - 4.478).abs() < 1e-3);
}
