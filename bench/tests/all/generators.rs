//! The generators have the same distributions as YCSB's own: a two-sample chi-square test of histograms of ten million
//! draws.

use farside_bench::workload::{
    Exponential, Hotspot, Random, ScrambledZipfian, SkewedLatest, UniformLong, ZIPFIAN_THETA, Zipfian, random,
};

const DRAWS: u64 = 10_000_000;

/// Returns the histogram that YCSB's own class draws with these parameters.
fn ycsbs(class: &str, parameters: &str) -> Vec<u64> {
    let lines = include_str!("ycsb/frequencies.txt").lines().filter(|line| !line.starts_with('#'));
    let mut lines = lines.map(|line| line.split(' '));
    let counts = lines.find_map(|mut words| {
        (words.next() == Some(class) && words.next() == Some(parameters)).then_some(words)
    });
    let counts = counts.unwrap_or_else(|| panic!("{class} {parameters} is not among the frequencies"));
    let counts: Vec<u64> = counts.map(|count| count.parse().expect("a count")).collect();
    assert_eq!(counts.iter().sum::<u64>(), DRAWS, "{class} {parameters}");
    counts
}

/// Returns the histogram of our generator, with `cells` cells.
fn ours(cells: usize, seed: u64, mut next: impl FnMut(&mut Random) -> u64) -> Vec<u64> {
    let mut random = random(seed);
    let mut seen = vec![0; cells];
    for _ in 0..DRAWS {
        seen[(next(&mut random) as usize).min(cells - 1)] += 1;
    }
    seen
}

/// Returns the chi-square of two samples of the same size. It is about the number of cells if both samples have the
/// same distribution. Cells with few draws in both samples are merged.
fn chi_square(a: &[u64], b: &[u64]) -> (f64, usize) {
    const FEW: u64 = 20;
    let (mut sum, mut cells, mut rest) = (0.0, 0usize, (0, 0));
    let mut add = |a: u64, b: u64| {
        sum += (a as f64 - b as f64).powi(2) / (a + b) as f64;
        cells += 1;
    };
    for (&a, &b) in a.iter().zip(b) {
        if a + b < FEW {
            rest = (rest.0 + a, rest.1 + b);
        } else {
            add(a, b);
        }
    }
    if rest != (0, 0) {
        add(rest.0, rest.1);
    }
    (sum, cells)
}

/// Returns the chi-square that is exceeded with a probability of one in a million: Wilson and Hilferty's
/// approximation.
fn bound(cells: usize) -> f64 {
    let freedom = cells.saturating_sub(1).max(1) as f64;
    let spread = 2.0 / (9.0 * freedom);
    freedom * (1.0 - spread + 4.75 * spread.sqrt()).powi(3)
}

#[track_caller]
fn is_ycsbs(class: &str, parameters: &str, next: impl FnMut(&mut Random) -> u64) {
    let ycsbs = ycsbs(class, parameters);
    let (chi_square, cells) = chi_square(&ycsbs, &ours(ycsbs.len(), 1, next));
    println!("{class} {parameters}: chi-square {chi_square:.1} of {cells} cells, bound {:.1}", bound(cells));
    assert!(chi_square < bound(cells), "{class} {parameters}: {chi_square} of {cells} cells");
}

#[test]
fn uniform_matches_ycsb() {
    let mut uniform = UniformLong::new(0, 99);
    is_ycsbs("UniformLongGenerator", "0..99", |random| uniform.next(random));
}

#[test]
fn zipfian_matches_ycsb() {
    for items in [100, 1000] {
        let mut zipfian = Zipfian::new(items, ZIPFIAN_THETA);
        is_ycsbs("ZipfianGenerator", &items.to_string(), |random| zipfian.next(random));
    }
}

#[test]
fn scrambled_zipfian_matches_ycsb() {
    let mut scrambled = ScrambledZipfian::new(1000);
    is_ycsbs("ScrambledZipfianGenerator", "0..999", |random| scrambled.next(random));
}

#[test]
fn latest_matches_ycsb() {
    let mut latest = SkewedLatest::new(999);
    is_ycsbs("SkewedLatestGenerator", "newest=999", |random| latest.next(999, random));
}

#[test]
fn hotspot_matches_ycsb() {
    let mut hotspot = Hotspot::new(100, 0.2, 0.8);
    is_ycsbs("HotspotIntegerGenerator", "0..99,0.2,0.8", |random| hotspot.next(random));
}

#[test]
fn exponential_matches_ycsb() {
    let mut exponential = Exponential::new(95.0, 85.71428571);
    is_ycsbs("ExponentialGenerator", "95,85.71428571", |random| exponential.next(random));
}

#[test]
fn a_slightly_different_distribution_fails_the_test() {
    let differs = |class, parameters, next: &mut dyn FnMut(&mut Random) -> u64| {
        let ycsbs = ycsbs(class, parameters);
        let (chi_square, cells) = chi_square(&ycsbs, &ours(ycsbs.len(), 2, next));
        assert!(chi_square > bound(cells), "{class} {parameters}: {chi_square} of {cells} cells");
    };
    let mut flatter = Zipfian::new(100, 0.985);
    differs("ZipfianGenerator", "100", &mut |random| flatter.next(random));
    let mut other_range = ScrambledZipfian::new(1001);
    differs("ScrambledZipfianGenerator", "0..999", &mut |random| other_range.next(random));
    let mut colder = Hotspot::new(100, 0.2, 0.797);
    differs("HotspotIntegerGenerator", "0..99,0.2,0.8", &mut |random| colder.next(random));
    let mut longer = Exponential::new(95.0, 86.5);
    differs("ExponentialGenerator", "95,85.71428571", &mut |random| longer.next(random));
}
