//! Looks at the page in Chromium, as a reader would: in light and dark mode, on a phone and on paper. No text is clipped
//! or overlaps another, none leaves its figure, and its contrast is at least 4.5.
#![allow(clippy::unwrap_used)]

mod browser;
mod synthetic;

use std::fs;

use serde_json::Value as Json;

/// Mode and width of the viewport in pixels; A4 without its margins is about 690 px wide.
const MODES: [(&str, u32); 4] = [("light", 1280), ("dark", 1280), ("narrow", 420), ("print", 690)];

/// What the probe reports of `page` in each mode; `None` without a browser.
fn look(name: &str, page: &str) -> Option<Vec<Json>> {
    let Some(browser) = browser::find() else {
        println!("SKIPPED: no chromium in PATH");
        return None;
    };
    let directory = std::env::temp_dir().join(format!("ringbolt-report-{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&directory).unwrap();
    let probe = format!("<script>{}</script></body>", include_str!("browser/probe.js"));
    assert!(page.contains("</body>"));
    let frames: String = MODES
        .map(|(mode, width)| format!("<iframe src=\"/report#{mode}\" width={width} height=900></iframe>"))
        .concat();
    let outer = format!(
        "<!doctype html><title>modes</title><link rel=icon href=data:,><body><script>const seen = [];\
         addEventListener('message', (event) => {{ seen.push(event.data);\
         if (seen.length === {}) fetch('/seen', {{method: 'POST', body: JSON.stringify(seen)}}); }});</script>\
         {frames}</body>",
        MODES.len()
    );
    let pages = [("/modes", outer), ("/report", page.replace("</body>", &probe))];
    let text = browser::posted(browser, &directory, &pages);
    let _ = fs::remove_dir_all(&directory);
    let seen: Vec<Json> = serde_json::from_str(&text).unwrap();
    assert_eq!(seen.len(), MODES.len());
    for (mode, width) in MODES {
        let found = seen.iter().find(|one| one["mode"] == mode).unwrap();
        assert_eq!(found["width"], width, "{mode}");
    }
    Some(seen)
}

fn issues(seen: &[Json]) -> Vec<&str> {
    seen.iter().flat_map(|one| one["issues"].as_array().unwrap()).map(|one| one.as_str().unwrap()).collect()
}

#[test]
fn a_reader_stumbles_over_nothing_in_any_mode() {
    let page = lab_report::page::render_html(&synthetic::run(700, 2)).unwrap();
    let Some(seen) = look("layout", &page) else { return };
    let issues = issues(&seen);
    let shown: Vec<&&str> = issues.iter().take(60).collect();
    assert!(issues.is_empty(), "{} issues: {shown:#?}", issues.len());
    for one in &seen {
        assert!(one["figures"].as_u64() > Some(40) && one["texts"].as_u64() > Some(500), "{one}");
    }
    // The first chart was saved in each format.
    let light = seen.iter().find(|one| one["mode"] == "light").unwrap();
    let files: Vec<&str> =
        light["files"].as_array().unwrap().iter().map(|one| one.as_str().unwrap()).collect();
    assert_eq!(files.len(), 3, "{files:?}");
    for (kind, wanted) in
        [(".svg image/svg+xml ", "<svg"), (".png image/png ", ""), (".csv text/csv ", "series,source,")]
    {
        assert!(files.iter().any(|file| file.contains(kind) && file.contains(wanted)), "{kind}: {files:?}");
    }
}

#[test]
fn a_comparison_fits_its_page() {
    let runs = [synthetic::run(200, 3), synthetic::run(200, 3)];
    let [a, mut b] = runs;
    for record in b.records.iter_mut().filter(|record| record.is_measured()) {
        let iops = record.metric("fg", "iops").unwrap();
        record.role_mut("fg").set("iops", iops * 0.8);
    }
    let comparison = lab_report::compare::compare(&[a], &[b], Default::default());
    let Some(seen) = look("comparison", &lab_report::compare::html(&comparison)) else { return };
    let issues = issues(&seen);
    assert!(issues.is_empty(), "{} issues: {:#?}", issues.len(), &issues[..issues.len().min(40)]);
    assert!(seen.iter().all(|one| one["figures"].as_u64() > Some(3)), "{seen:?}");
    let light = seen.iter().find(|one| one["mode"] == "light").unwrap();
    assert_eq!(light["files"].as_array().unwrap().len(), 3, "the first chart was saved: {light}");
}

#[test]
fn a_comparison_of_many_runs_fits_its_page() {
    let scaled = |factor: f64| {
        let mut run = synthetic::run(60, 3);
        for record in run.records.iter_mut().filter(|record| record.is_measured()) {
            let iops = record.metric("fg", "iops").unwrap();
            record.role_mut("fg").set("iops", iops * factor);
        }
        run
    };
    let runs = [1.0, 0.8, 1.5, 2.0].map(scaled);
    let many = lab_report::compare::compare_many(&[scaled(1.0)], &runs, Default::default());
    let page = lab_report::compare::html_of_many(&many);
    let Some(seen) = look("many", &page) else { return };
    let issues = issues(&seen);
    assert!(issues.is_empty(), "{} issues: {:#?}", issues.len(), &issues[..issues.len().min(40)]);
    let light = seen.iter().find(|one| one["mode"] == "light").unwrap();
    assert_eq!(light["files"].as_array().unwrap().len(), 3, "{light}");
}

#[test]
fn each_fault_of_a_page_is_noticed() {
    let page = lab_report::page::render_html(&synthetic::run(60, 1)).unwrap();
    let figure = "<figure id=fault><svg class=chart viewBox='0 0 200 50' width=200 height=50 aria-label=x>\
                  <text x=10 y=20 style='fill:#999'>grey words</text><text x=14 y=22>over them</text>\
                  <text x=900 y=20>far away</text><text x=100 y=40>number</text>\
                  <path class=e2 d='M110 10L110 50'/>\
                  <text x=150 y=45 style='font-size:2px'>tiny</text></svg></figure>\
                  <div class=beside><div class=panels style='width:100%'><figure>alone</figure></div><br><div>below</div></div>\
                  <div class=scroll><table class=checks><tr><td style='min-width:1500px'>x</table></div>\
                  <p style='overflow:hidden;width:20px;white-space:nowrap'>clipped words</p>\
                  <p style='width:1500px;max-width:none'>wide</p></main>";
    let Some(seen) = look("faults", &page.replacen("</main>", figure, 1)) else { return };
    let issues = issues(&seen);
    for (mode, _) in MODES {
        for fault in [
            "overlap",
            "outside its figure",
            "crossed by an interval",
            "smaller than 10 px",
            "half of the page is empty",
            "clipped",
            "wider than its place",
            "wider than the page",
            "contrast",
        ] {
            // Grey has enough contrast on a dark page, and a narrow page has no room beside a figure.
            let expected = match fault {
                "contrast" => mode != "dark",
                "half of the page is empty" => ["light", "dark"].contains(&mode),
                _ => true,
            };
            let found = issues.iter().any(|issue| issue.starts_with(&format!("{mode}: {fault}")));
            assert_eq!(found, expected, "{mode}: {fault}: {issues:#?}");
        }
    }
}
