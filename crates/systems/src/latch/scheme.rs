//! Schemes: how a client takes and releases an object's latch, and how it reads the object.
//!
//! Each correct scheme has a name. The pessimistic schemes are the ablation of the paper: each step of [`Steps`] keeps
//! the steps before it.

use farside_remote::Capabilities;
use serde::{Deserialize, Serialize};
use std::fmt;

/// How clients synchronize their accesses to the objects of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Scheme {
    /// Kind of the latch word.
    pub word: Word,
    /// Overlap of the requests of an operation that holds the latch.
    pub steps: Steps,
    /// How an object is read.
    pub reads: Reads,
}

/// Kind of a latch word (section 2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// 0 is free, 1 is held. A client takes it by CAS. Readers take it like writers.
    Exclusive,
    /// Bit 60 says that a writer holds it. The bits below count the readers that hold it or try to take it.
    ReaderWriter,
}

/// Overlap of the requests of an operation that holds the latch (section 2.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Steps {
    /// Each request is awaited before the next one is sent ("a").
    Basic,
    /// The READ is sent with the atomic that takes the latch ("b").
    Speculative,
    /// The atomic that releases the latch is sent with the WRITE ("c").
    Overlapped,
    /// The WRITE and the release are not awaited ("d").
    Async,
    /// The WRITE also releases the latch, which lies in the last line of the object ("e").
    Unlatch,
}

/// How an object is read (section 3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// Under the latch.
    Latched,
    /// By two ordered READs and a validation ("V2").
    Twice,
    /// By one READ that a CRC-64 of the content checks, and a validation.
    Checksum,
    /// By one READ that a version in each cache line checks, and a validation.
    Versions,
}

impl Scheme {
    const fn new(word: Word, steps: Steps, reads: Reads) -> Scheme {
        Scheme { word, steps, reads }
    }

    /// All schemes with their names.
    pub const ALL: [(&str, Scheme); 15] = {
        use Reads::{Checksum, Latched, Twice, Versions};
        use Steps::{Async, Basic, Overlapped, Speculative, Unlatch};
        use Word::{Exclusive, ReaderWriter};
        [
            ("basic", Scheme::new(Exclusive, Basic, Latched)),
            ("speculative", Scheme::new(Exclusive, Speculative, Latched)),
            ("overlapped", Scheme::new(Exclusive, Overlapped, Latched)),
            ("async", Scheme::new(Exclusive, Async, Latched)),
            ("unlatch", Scheme::new(Exclusive, Unlatch, Latched)),
            ("basic-rw", Scheme::new(ReaderWriter, Basic, Latched)),
            ("speculative-rw", Scheme::new(ReaderWriter, Speculative, Latched)),
            ("overlapped-rw", Scheme::new(ReaderWriter, Overlapped, Latched)),
            ("async-rw", Scheme::new(ReaderWriter, Async, Latched)),
            ("v2", Scheme::new(Exclusive, Overlapped, Twice)),
            ("v2-footer", Scheme::new(Exclusive, Unlatch, Twice)),
            ("crc", Scheme::new(Exclusive, Overlapped, Checksum)),
            ("crc-footer", Scheme::new(Exclusive, Unlatch, Checksum)),
            ("versions", Scheme::new(Exclusive, Overlapped, Versions)),
            ("versions-footer", Scheme::new(Exclusive, Unlatch, Versions)),
        ]
    };

    /// Returns the scheme with this name.
    pub fn named(name: &str) -> Option<Scheme> {
        Scheme::ALL.iter().find(|(known, _)| *known == name).map(|(_, scheme)| *scheme)
    }

    /// Name of the scheme in flags and reports.
    pub fn name(self) -> &'static str {
        let (name, _) =
            Scheme::ALL.iter().find(|(_, scheme)| *scheme == self).expect("every scheme has a name");
        name
    }

    /// Capabilities that a client needs from its fabric.
    pub fn needs(self) -> Capabilities {
        match self.reads {
            Reads::Versions => Capabilities::WHOLE_LINES,
            Reads::Latched | Reads::Twice | Reads::Checksum => Capabilities::NONE,
        }
    }

    /// Whether readers can hold the latch together.
    pub fn has_shared_mode(self) -> bool {
        self.word == Word::ReaderWriter
    }

    /// Whether reads take no latch.
    pub fn is_optimistic(self) -> bool {
        self.reads != Reads::Latched
    }

    /// Whether the latch lies behind the content, so that one WRITE can store the content and release the latch.
    pub fn is_footer(self) -> bool {
        self.steps == Steps::Unlatch
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl From<Scheme> for String {
    fn from(scheme: Scheme) -> String {
        scheme.name().to_owned()
    }
}

impl TryFrom<String> for Scheme {
    type Error = String;

    fn try_from(name: String) -> Result<Scheme, String> {
        Scheme::named(&name).ok_or_else(|| {
            let names: Vec<&str> = Scheme::ALL.iter().map(|(name, _)| *name).collect();
            format!("unknown scheme '{name}': name one of {}", names.join(", "))
        })
    }
}
