//! What figures of applications show, as numbers: Burke et al., *PRISM: Rethinking the RDMA Interface for Distributed
//! Systems* (SOSP 2021), read from its figures. Nothing of this is an input of the model: what that is calibrated on
//! is in [`farside_sim::micro`].

use super::load::System;
use farside_sim::hardware::Platform;

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
