//! What the papers' figures show, as numbers: Burke et al., *PRISM: Rethinking the RDMA Interface for Distributed
//! Systems* (SOSP 2021), read from its figures; Ziegler et al., *Design Guidelines for Correct, Efficient, and Scalable
//! Synchronization using One-Sided RDMA* (SIGMOD 2023), from its text.

use super::load::System;
use farside_sim::hardware::Platform;
use farside_sim::micro::MicroOp;

/// PRISM, figure 1: microseconds of each op on the platforms of [`Platform::ALL`]; nothing where there is no bar.
pub(super) const FIGURE_1: [(MicroOp, [Option<f64>; 4]); 5] = [
    (MicroOp::Read, [Some(2.5), Some(5.3), Some(2.5), Some(11.7)]),
    (MicroOp::Write, [Some(1.9), Some(5.0), Some(1.9), Some(12.7)]),
    (MicroOp::IndirectRead, [None, Some(5.0), Some(3.1), Some(14.9)]),
    (MicroOp::Allocate, [None, Some(5.3), Some(1.9), Some(12.7)]),
    (MicroOp::EnhancedCas, [None, Some(5.0), Some(2.5), Some(14.6)]),
];

/// PRISM, figure 2: microseconds of an indirect READ, or of two READs in its place, in a rack, a cluster, a data centre.
pub(super) const FIGURE_2: [(Platform, [f64; 3]); 4] = [
    (Platform::Rdma, [6.1, 10.9, 52.9]),
    (Platform::PrismSw, [5.8, 8.1, 29.2]),
    (Platform::PrismHw, [3.1, 5.4, 26.3]),
    (Platform::BlueField, [12.4, 14.6, 35.7]),
];

/// A curve of PRISM's figures 3 and 4.
pub(super) struct KvCurve {
    /// Its name there.
    pub(super) name: &'static str,
    pub(super) system: System,
    pub(super) platform: Platform,
    /// Microseconds at low load, and at how many million operations a second if that can be read.
    pub(super) low: (Option<f64>, f64),
    /// Points between: million operations a second, and microseconds.
    pub(super) points: &'static [(f64, f64)],
    /// The most million operations a second.
    pub(super) peak: f64,
}

/// PRISM, figure 3: 100 % reads.
pub(super) const FIGURE_3: [KvCurve; 3] = [
    KvCurve {
        name: "PRISM-KV",
        system: System::PrismKv,
        platform: Platform::PrismSw,
        low: (Some(0.5), 6.5),
        points: &[(4.1, 6.9), (7.0, 8.1)],
        peak: 8.2,
    },
    KvCurve {
        name: "Pilaf (HW)",
        system: System::Pilaf,
        platform: Platform::Rdma,
        low: (Some(0.4), 9.0),
        points: &[(5.6, 10.5)],
        peak: 6.7,
    },
    KvCurve {
        name: "Pilaf (SW)",
        system: System::Pilaf,
        platform: Platform::PrismSw,
        low: (None, 13.4),
        points: &[(3.7, 16.4)],
        peak: 6.6,
    },
];

/// PRISM, figure 4: 50 % reads.
pub(super) const FIGURE_4: [KvCurve; 3] = [
    KvCurve {
        name: "PRISM-KV",
        system: System::PrismKv,
        platform: Platform::PrismSw,
        low: (None, 9.5),
        points: &[(9.1, 13.4), (11.8, 21.0)],
        peak: 11.9,
    },
    KvCurve {
        name: "Pilaf (HW)",
        system: System::Pilaf,
        platform: Platform::Rdma,
        low: (None, 8.7),
        points: &[(10.2, 11.6)],
        peak: 11.9,
    },
    KvCurve {
        name: "Pilaf (SW)",
        system: System::Pilaf,
        platform: Platform::PrismSw,
        low: (None, 10.6),
        points: &[(7.7, 20.0)],
        peak: 9.2,
    },
];

/// A row of *Synchronization*, section 4.
pub(super) struct AtomicsRow {
    pub(super) what: &'static str,
    pub(super) workers: u32,
    /// Bytes from one worker's word to the next's.
    pub(super) stride: u64,
    pub(super) is_atomic: bool,
    /// Million verbs a second.
    pub(super) published: f64,
}

const fn cas(what: &'static str, workers: u32, stride: u64, published: f64) -> AtomicsRow {
    AtomicsRow { what, workers, stride, is_atomic: true, published }
}

/// *Synchronization*, section 4.
pub(super) const SECTION_4: [AtomicsRow; 7] = [
    cas("CAS, 64 bytes apart, 128 workers", 128, 64, 51.2),
    AtomicsRow {
        what: "READ of 8 bytes, 128 workers",
        workers: 128,
        stride: 64,
        is_atomic: false,
        published: 51.2,
    },
    cas("CAS, one word, 8 workers", 8, 0, 2.32),
    cas("CAS, one word, 128 workers", 128, 0, 2.32),
    cas("CAS, 256 bytes apart, 128 workers", 128, 256, 40.0),
    cas("CAS, 512 bytes apart, 128 workers", 128, 512, 25.6),
    cas("CAS, 4 KiB and 8 bytes apart, 128 workers", 128, 4_096 + 8, 51.2),
];
