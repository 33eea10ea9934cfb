//! A workload from a YCSB property file.
//!
//! Invariant: a `Workload` is valid: it has records and operations, and its fractions are in their ranges.
//! Invariant: no property is dropped silently. Properties without effect are kept in `unused`.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::distribution::{Distribution, KeyChooser};
use super::lengths::Lengths;
use super::operations::{Chooser, Mix, Operation};
use super::properties::{self, Property, SyntaxError};

/// Names and texts of the built-in property files.
const BUILT_IN: [(&str, &str); 6] = [
    ("a", include_str!("../../../workloads/workloada")),
    ("b", include_str!("../../../workloads/workloadb")),
    ("c", include_str!("../../../workloads/workloadc")),
    ("d", include_str!("../../../workloads/workloadd")),
    ("e", include_str!("../../../workloads/workloade")),
    ("f", include_str!("../../../workloads/workloadf")),
];

/// YCSB's default number of records of the longest scan.
const SCAN_MAX_DEFAULT: u64 = 1000;
/// Default number of records. It is the number in all of YCSB's own files; YCSB's default is 2^31 - 1.
const RECORDS_DEFAULT: u64 = 1000;

/// A workload: the mix of operations, the records, and the amounts.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Name or path of the workload.
    pub name: String,
    /// Number of records loaded before the first operation, at least 1: `recordcount`.
    pub records: u64,
    /// Total number of operations, or 0 for no limit: `operationcount`.
    pub operations: u64,
    /// Share of each kind of operation: `readproportion` and so on.
    pub mix: Mix,
    /// Distribution of requests over the records: `requestdistribution`.
    pub distribution: Distribution,
    /// Number of records of the longest scan: `maxscanlength`. The number of records of a scan is drawn from 1 to this
    /// one, all equally often. Without effect unless there are scans.
    pub scan_max: u64,
    /// Distribution of the lengths of values: `fieldlengthdistribution` and `minfieldlength`.
    pub lengths: Lengths,
    /// Numbers of records and operations, duration and value size that the user chose.
    pub chosen: Chosen,
    /// Properties of the file that have no effect, to be reported as a warning.
    pub unused: Vec<Property>,
}

/// Numbers of operations and records that the user chose, in a file or by a property on the command line. The built-in
/// files choose none: their counts suit every machine, but are too small for a measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Chosen {
    /// Number of records: `recordcount`.
    pub records: Option<u64>,
    /// Number of operations: `operationcount`.
    pub operations: Option<u64>,
    /// Maximum duration in seconds: `maxexecutiontime`.
    pub seconds: Option<u64>,
    /// Length of a value in bytes: `fieldcount` times `fieldlength`, because a record has a single field here.
    pub value_size: Option<u64>,
}

impl Workload {
    /// Returns the built-in workload `a`, `b`, `c`, `d`, `e` or `f`. For any other name, reads the file at that path.
    ///
    /// # Errors
    /// The file cannot be read, or contains no valid workload.
    pub fn resolve(name_or_path: &str) -> Result<Self, WorkloadError> {
        Self::resolve_with(name_or_path, &[])
    }

    /// Resolves a workload as [`resolve`](Self::resolve) does, with `properties` such as `readproportion=0.9`. They
    /// override the file's properties of the same name.
    ///
    /// # Errors
    /// The errors of [`resolve`](Self::resolve); or one of `properties` is invalid or has no effect.
    pub fn resolve_with(name_or_path: &str, properties: &[String]) -> Result<Self, WorkloadError> {
        let beside = properties.iter().map(|text| beside(text)).collect::<Result<Vec<_>, _>>()?;
        if let Some((name, text)) = BUILT_IN.iter().find(|(name, _)| *name == name_or_path) {
            let properties = properties::parse(text).map_err(WorkloadError::Syntax)?;
            return Self::from_properties(name, properties, beside, |property| property.line == COMMAND_LINE);
        }
        let (path, is_alone) = (Path::new(name_or_path), beside.is_empty());
        let text = std::fs::read_to_string(path)
            .map_err(|cause| WorkloadError::Unreadable { path: path.to_owned(), cause })?;
        let there = |error: WorkloadError| error.in_file(path, is_alone);
        let properties = properties::parse(&text).map_err(WorkloadError::Syntax).map_err(there)?;
        let count = properties.len();
        let workload = Self::from_properties(name_or_path, properties, beside, |_| true).map_err(there)?;
        // A file without any effective property is probably not a property file. It would run with YCSB's defaults.
        match workload.unused.len() == count {
            true => Err(WorkloadError::NoProperty { path: path.to_owned() }),
            false => Ok(workload),
        }
    }

    /// Parses the workload in `text` and names it `name`.
    ///
    /// # Errors
    /// Returns an error about the first line that is no property, or whose value is invalid.
    pub fn parse(name: &str, text: &str) -> Result<Self, WorkloadError> {
        Self::from_properties(
            name,
            properties::parse(text).map_err(WorkloadError::Syntax)?,
            Vec::new(),
            |_| true,
        )
    }

    /// Creates the workload of the properties of a file, overridden by the properties in `beside`.
    fn from_properties(
        name: &str,
        mut properties: Vec<Property>,
        beside: Vec<Property>,
        is_chosen: impl Fn(&Property) -> bool,
    ) -> Result<Self, WorkloadError> {
        properties.retain(|property| beside.iter().all(|other| other.key != property.key));
        properties.extend(beside);
        let mut file = File { left: properties, overruled: Vec::new() };
        let mut theirs =
            File { left: file.left.iter().filter(|p| is_chosen(p)).cloned().collect(), ..File::default() };
        let chosen = theirs.chosen()?;
        file.take("workload", "a class whose name ends in CoreWorkload", |class| {
            class.ends_with("CoreWorkload").then_some(())
        })?;
        let records = file.number("recordcount", 1)?.unwrap_or(RECORDS_DEFAULT);
        let operations = file.number("operationcount", 0)?.unwrap_or(0);
        file.number("maxexecutiontime", 0)?;
        let (fields, length) = (file.number("fieldcount", 0)?, file.number("fieldlength", 0)?);
        // YCSB's default, if the value's length is that of its fields.
        let fields = fields.unwrap_or(if length.is_some() { 10 } else { 1 });
        let mix = mix(&mut file)?;
        let distribution = distribution(&mut file)?;
        let lengths = lengths(&mut file, fields)?;
        let scan_max = if mix.share(Operation::Scan) > 0.0 { scan_max(&mut file)? } else { SCAN_MAX_DEFAULT };
        let unused = file.unused();
        // A property on the command line without effect is a mistake.
        match unused.iter().find(|property| property.line == COMMAND_LINE) {
            Some(property) => Err(WorkloadError::Unknown { property: property.clone() }),
            None => {
                let name = name.to_owned();
                Ok(Self { name, records, operations, mix, distribution, scan_max, lengths, chosen, unused })
            }
        }
    }

    /// Creates a chooser of operations.
    pub fn chooser(&self) -> Chooser {
        Chooser::new(self.mix)
    }

    /// Creates a chooser of records. For `latest`, this takes time proportional to the number of records: clone the
    /// chooser for more threads.
    pub fn keys(&self) -> KeyChooser {
        // 2 is YCSB's own "fudge factor".
        let inserts_expected = (self.operations as f64 * self.mix.share(Operation::Insert) * 2.0) as u64;
        KeyChooser::new(self.distribution, self.records, inserts_expected)
    }
}

/// Line number of a property that is given on the command line.
const COMMAND_LINE: usize = 0;

/// Parses a property that is given on the command line.
fn beside(text: &str) -> Result<Property, WorkloadError> {
    let wrong = || WorkloadError::NotAProperty { text: text.to_owned() };
    let mut parsed = properties::parse(text).map_err(|_| wrong())?;
    let property = parsed.pop().filter(|_| text.contains('=')).ok_or_else(wrong)?;
    if parsed.is_empty() { Ok(Property { line: COMMAND_LINE, ..property }) } else { Err(wrong()) }
}

/// Prints the effective settings in one line.
impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, records, mix, distribution, lengths, .. } = self;
        write!(f, "{name}: {mix}; {distribution} over {records} records, 8-byte keys")?;
        if *lengths == Lengths::Constant { Ok(()) } else { write!(f, "; {lengths}") }
    }
}

/// Error of a workload's name, file or properties.
#[derive(Debug)]
pub enum WorkloadError {
    /// The given name is neither the name of a built-in workload nor the path of a readable file.
    Unreadable {
        /// The given name or path.
        path: PathBuf,
        /// Error of the operating system.
        cause: io::Error,
    },
    /// A line of the file is no property.
    Syntax(SyntaxError),
    /// A property has an invalid value.
    Value {
        /// The property with the invalid value.
        property: Property,
        /// Description of the valid values.
        legal: &'static str,
    },
    /// No property in the file has an effect.
    NoProperty {
        /// Path of the file.
        path: PathBuf,
    },
    /// A file contains an error.
    InFile {
        /// Path of the file.
        path: PathBuf,
        /// The error in the file.
        error: Box<WorkloadError>,
    },
    /// All proportions of operations are 0.
    NoOperations,
    /// An argument on the command line is no property.
    NotAProperty {
        /// The argument that is no property.
        text: String,
    },
    /// A property on the command line has no effect.
    Unknown {
        /// The property without effect.
        property: Property,
    },
}

impl WorkloadError {
    /// Adds the file's path to an error, unless the error is in a property on the command line. `is_alone` states that
    /// there are no properties on the command line.
    fn in_file(self, path: &Path, is_alone: bool) -> Self {
        match self {
            Self::NoOperations if !is_alone => self,
            Self::Value { property: Property { line: COMMAND_LINE, .. }, .. } | Self::Unknown { .. } => self,
            error => Self::InFile { path: path.to_owned(), error: Box::new(error) },
        }
    }
}

impl fmt::Display for WorkloadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable { path, cause } => {
                let path = path.display();
                write!(f, "no workload '{path}': {cause}; built in are a, b, c, d, e and f, ")?;
                f.write_str("any other name is the path of a YCSB property file")
            }
            Self::Syntax(error) => error.fmt(f),
            Self::InFile { path, error } => write!(f, "{}: {error}", path.display()),
            Self::Value { property: Property { line, key, value }, legal } => {
                if *line != COMMAND_LINE {
                    write!(f, "line {line}: ")?;
                }
                write!(f, "{key} is '{value}', legal is {legal}")
            }
            Self::NotAProperty { text } => {
                write!(f, "'{text}' is no property: write it like readproportion=0.95")
            }
            Self::Unknown { property } => write!(
                f,
                "the property '{}' has no effect here: omit it, or check its spelling (known are workload, \
                 recordcount, operationcount, maxexecutiontime, fieldcount, fieldlength, fieldlengthdistribution, \
                 minfieldlength with a distribution that needs it, readproportion, updateproportion, \
                 insertproportion, scanproportion, readmodifywriteproportion, maxscanlength and scanlengthdistribution \
                 with scans, requestdistribution, and those of the distribution)",
                property.key
            ),
            Self::NoProperty { path } => write!(
                f,
                "'{}' states no workload: none of its lines is a known property, such as readproportion=0.95",
                path.display()
            ),
            Self::NoOperations => {
                f.write_str(
                    "all proportions are 0: one of readproportion, updateproportion, insertproportion, ",
                )?;
                f.write_str("scanproportion and readmodifywriteproportion must be greater than 0")
            }
        }
    }
}

impl std::error::Error for WorkloadError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Unreadable { cause, .. } => Some(cause),
            Self::Syntax(error) => Some(error),
            // Its text includes the inner error.
            Self::InFile { error, .. } => error.source(),
            Self::Value { .. }
            | Self::NoProperty { .. }
            | Self::NoOperations
            | Self::NotAProperty { .. }
            | Self::Unknown { .. } => None,
        }
    }
}

/// Properties of a file, which the parser takes out one by one.
#[derive(Default)]
struct File {
    /// Properties that no setting has taken yet.
    left: Vec<Property>,
    /// Properties whose key occurs again on a later line.
    overruled: Vec<Property>,
}

impl File {
    /// Takes the property `key` out of the file. Returns its last value, parsed by `read`; `None` if the property is
    /// missing.
    fn take<T>(
        &mut self,
        key: &str,
        legal: &'static str,
        read: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>, WorkloadError> {
        let mut found: Vec<Property> = self.left.extract_if(.., |property| property.key == key).collect();
        let Some(property) = found.pop() else {
            return Ok(None);
        };
        self.overruled.append(&mut found);
        match read(&property.value) {
            Some(value) => Ok(Some(value)),
            None => Err(WorkloadError::Value { property, legal }),
        }
    }

    /// Takes the properties of the amounts out of the file. If only one of `fieldcount` and `fieldlength` is given,
    /// the other has YCSB's default.
    fn chosen(&mut self) -> Result<Chosen, WorkloadError> {
        let records = self.number("recordcount", 1)?;
        let operations = self.number("operationcount", 0)?.filter(|&operations| operations > 0);
        let seconds = self.number("maxexecutiontime", 0)?.filter(|&seconds| seconds > 0);
        let (fields, length) = (self.number("fieldcount", 1)?, self.number("fieldlength", 1)?);
        let value_size =
            fields.or(length).map(|_| fields.unwrap_or(10).saturating_mul(length.unwrap_or(100)));
        Ok(Chosen { records, operations, seconds, value_size })
    }

    /// Returns the properties that have no effect, in the order of the file.
    fn unused(self) -> Vec<Property> {
        let mut unused = [self.left, self.overruled].concat();
        unused.sort_by_key(|property| property.line);
        unused
    }

    /// Takes a property whose value is a whole number of at least `least`, which is 0 or 1.
    fn number(&mut self, key: &str, least: u64) -> Result<Option<u64>, WorkloadError> {
        let legal = if least == 0 { "a whole number" } else { "a whole number from 1 on" };
        self.take(key, legal, |value| u64::from_str(value).ok().filter(|&number| number >= least))
    }

    /// Takes a property whose value is a number from 0 to 1.
    fn fraction(&mut self, key: &str) -> Result<Option<f64>, WorkloadError> {
        self.take(key, "a number from 0 to 1", |value| {
            number_in(value, |number| (0.0..=1.0).contains(&number))
        })
    }
}

fn number_in(value: &str, legal: impl Fn(f64) -> bool) -> Option<f64> {
    f64::from_str(value).ok().filter(|&number| legal(number))
}

fn mix(file: &mut File) -> Result<Mix, WorkloadError> {
    // YCSB's defaults for missing properties.
    let weights = [
        file.fraction("readproportion")?.unwrap_or(0.95),
        file.fraction("updateproportion")?.unwrap_or(0.05),
        file.fraction("insertproportion")?.unwrap_or(0.0),
        file.fraction("scanproportion")?.unwrap_or(0.0),
        file.fraction("readmodifywriteproportion")?.unwrap_or(0.0),
    ];
    Mix::new(weights).ok_or(WorkloadError::NoOperations)
}

fn distribution(file: &mut File) -> Result<Distribution, WorkloadError> {
    let named = file.take("requestdistribution", Distribution::NAMES, Distribution::named)?;
    Ok(match named.unwrap_or(Distribution::Uniform) {
        Distribution::Hotspot { data_fraction, operation_fraction } => Distribution::Hotspot {
            data_fraction: file.fraction("hotspotdatafraction")?.unwrap_or(data_fraction),
            operation_fraction: file.fraction("hotspotopnfraction")?.unwrap_or(operation_fraction),
        },
        Distribution::Exponential { percentile, data_fraction } => {
            let above_0 = |number: f64| number > 0.0 && number.is_finite();
            let below_100 = |number| above_0(number) && number < 100.0;
            let given = file.take("exponential.percentile", "a number above 0 and below 100", |value| {
                number_in(value, below_100)
            })?;
            let part =
                file.take("exponential.frac", "a number above 0", |value| number_in(value, above_0))?;
            Distribution::Exponential {
                percentile: given.unwrap_or(percentile),
                data_fraction: part.unwrap_or(data_fraction),
            }
        }
        other => other,
    })
}

/// Takes the number of records of the longest scan out of the file.
fn scan_max(file: &mut File) -> Result<u64, WorkloadError> {
    file.take("scanlengthdistribution", "uniform", |name| (name == "uniform").then_some(()))?;
    let legal = "a whole number from 1 to 65536";
    let longest = file.take("maxscanlength", legal, |value| {
        u64::from_str(value).ok().filter(|longest| (1..=1 << 16).contains(longest))
    })?;
    Ok(longest.unwrap_or(SCAN_MAX_DEFAULT))
}

/// Takes the distribution of the lengths of values out of the file. A value has the bytes of `fields` fields.
fn lengths(file: &mut File, fields: u64) -> Result<Lengths, WorkloadError> {
    let named = file.take("fieldlengthdistribution", Lengths::NAMES, Lengths::named)?.unwrap_or_default();
    // YCSB ignores the shortest length if all values are equally long.
    if named == Lengths::Constant {
        return Ok(named);
    }
    let shortest = file.number("minfieldlength", 1)?.unwrap_or(1).saturating_mul(fields.max(1));
    Ok(match named {
        Lengths::Zipfian { .. } => Lengths::Zipfian { shortest },
        _ => Lengths::Uniform { shortest },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(workload: &Workload) -> [f64; 5] {
        Operation::ALL.map(|operation| workload.mix.share(operation))
    }

    #[test]
    fn the_built_in_workloads_match_ycsb() {
        for (name, expected) in [
            ("a", [0.5, 0.5, 0.0, 0.0, 0.0]),
            ("b", [0.95, 0.05, 0.0, 0.0, 0.0]),
            ("c", [1.0, 0.0, 0.0, 0.0, 0.0]),
            ("d", [0.95, 0.0, 0.05, 0.0, 0.0]),
            ("e", [0.0, 0.0, 0.05, 0.95, 0.0]),
            ("f", [0.5, 0.0, 0.0, 0.0, 0.5]),
        ] {
            let workload = Workload::resolve(name).unwrap();
            assert_eq!(shares(&workload), expected);
            let distribution = if name == "d" { Distribution::Latest } else { Distribution::Zipfian };
            assert_eq!((workload.distribution, workload.chosen), (distribution, Chosen::default()));
            assert_eq!((workload.records, workload.operations), (1000, 1000));
            assert_eq!(workload.scan_max, if name == "e" { 100 } else { SCAN_MAX_DEFAULT });
            assert_eq!(workload.unused, []);
        }
    }

    #[test]
    fn a_workload_prints_in_one_line() {
        let workload = Workload::resolve("b").unwrap();
        assert_eq!(
            workload.to_string(),
            "b: 95 % read, 5 % update; zipfian (theta 0.99, scrambled) over 1000 records, 8-byte keys"
        );
        let text = "requestdistribution=hotspot\nhotspotopnfraction=0.9\nrecordcount=50";
        assert_eq!(
            Workload::parse("x", text).unwrap().to_string(),
            "x: 95 % read, 5 % update; hotspot (90 % of operations on 20 % of records) over 50 records, 8-byte keys"
        );
        let exponential = Workload::parse("x", "requestdistribution=exponential").unwrap().to_string();
        assert!(exponential.contains("exponential (95 % of operations on the newest 85.7 % of records)"));
    }

    #[test]
    fn lengths_of_values_are_those_of_all_fields() {
        let lengths = |text: &str| {
            let workload = Workload::parse("x", text).unwrap();
            (workload.lengths, workload.unused.len())
        };
        assert_eq!(lengths("fieldlengthdistribution=constant\nminfieldlength=5"), (Lengths::Constant, 1));
        assert_eq!(lengths("fieldlengthdistribution=uniform"), (Lengths::Uniform { shortest: 1 }, 0));
        let fields = "fieldlengthdistribution=zipfian\nfieldlength=9\nminfieldlength=5";
        assert_eq!(lengths(fields), (Lengths::Zipfian { shortest: 50 }, 0), "YCSB has 10 fields");
        assert_eq!(lengths(&format!("{fields}\nfieldcount=2")), (Lengths::Zipfian { shortest: 10 }, 0));
        let printed = Workload::parse("x", fields).unwrap().to_string();
        assert!(printed.ends_with("8-byte keys; zipfian lengths of values, from 50 B"), "{printed}");
        let refused = Workload::parse("x", "fieldlengthdistribution=histogram").unwrap_err().to_string();
        assert!(refused.ends_with("legal is constant, uniform, zipfian"), "{refused}");
    }

    #[test]
    fn lengths_of_scans_have_an_effect_only_with_scans() {
        let of = |text: &str| Workload::parse("x", text).map(|found| (found.scan_max, found.unused.len()));
        assert_eq!(of("scanproportion=1\nmaxscanlength=7\nscanlengthdistribution=uniform").unwrap(), (7, 0));
        assert_eq!(of("scanproportion=1").unwrap(), (1000, 0));
        assert_eq!(of("maxscanlength=7").unwrap(), (1000, 1));
        let refused = of("scanproportion=1\nmaxscanlength=0").unwrap_err().to_string();
        assert!(refused.ends_with("legal is a whole number from 1 to 65536"), "{refused}");
        assert!(of("scanproportion=1\nscanlengthdistribution=zipfian").is_err());
    }

    #[test]
    fn an_empty_file_has_ycsbs_defaults() {
        let workload = Workload::parse("empty", "").unwrap();
        assert_eq!(shares(&workload), [0.95, 0.05, 0.0, 0.0, 0.0]);
        assert_eq!((workload.distribution, workload.operations), (Distribution::Uniform, 0));
    }

    #[test]
    fn the_last_of_equal_keys_counts_and_the_others_are_unused() {
        let workload = Workload::parse("x", "recordcount=0\ntable=t\nrecordcount=7").unwrap();
        assert_eq!(workload.records, 7);
        assert_eq!(workload.unused.iter().map(|property| property.line).collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn properties_without_effect_are_kept() {
        let text = "recordcount=5\ntable=t\nreadallfields=true\nexponential.frac=9\n";
        let unused = Workload::parse("x", text).unwrap().unused;
        let seen: Vec<_> = unused.iter().map(|p| (p.line, p.key.as_str(), p.value.as_str())).collect();
        assert_eq!(seen, [(2, "table", "t"), (3, "readallfields", "true"), (4, "exponential.frac", "9")]);
    }

    #[test]
    fn only_an_error_in_the_file_names_the_file() {
        let file = std::env::temp_dir().join(format!("farside-workload-{}", std::process::id()));
        let reported = |text: &str, beside: &[&str]| {
            std::fs::write(&file, text).expect("a file");
            let beside: Vec<String> = beside.iter().map(|&text| text.into()).collect();
            let wrong = Workload::resolve_with(file.to_str().expect("text"), &beside).unwrap_err();
            wrong.to_string()
        };
        let none = "readproportion=0\nupdateproportion=0";
        let named = [reported("recordcount=0", &[]), reported("a=\\u00", &[]), reported(none, &[])];
        let name = file.display().to_string();
        assert!(named.iter().all(|reported| reported.starts_with(&name)), "{named:?}");
        let good = "readproportion=1\nupdateproportion=0";
        let beside = [
            reported(good, &["recordcount=0"]),
            reported(good, &["readproportion=0"]),
            reported(good, &["recordscount=5"]),
            reported(good, &["recordcount"]),
        ];
        assert!(beside.iter().all(|reported| !reported.contains(&name)), "{beside:?}");
        std::fs::remove_file(&file).expect("the file exists");
    }

    #[test]
    fn an_invalid_value_is_reported_with_key_line_and_valid_values() {
        for (text, message) in [
            ("\nrecordcount=0", "line 2: recordcount is '0', legal is a whole number from 1 on"),
            ("recordcount=1e6", "line 1: recordcount is '1e6', legal is a whole number from 1 on"),
            ("operationcount=-1", "line 1: operationcount is '-1', legal is a whole number"),
            ("readproportion=95", "line 1: readproportion is '95', legal is a number from 0 to 1"),
            ("scanproportion=nan", "line 1: scanproportion is 'nan', legal is a number from 0 to 1"),
            ("insertproportion=", "line 1: insertproportion is '', legal is a number from 0 to 1"),
            (
                "requestdistribution=zipf",
                "line 1: requestdistribution is 'zipf', legal is uniform, zipfian, latest, hotspot, exponential",
            ),
            (
                "requestdistribution=hotspot\nhotspotdatafraction=20",
                "line 2: hotspotdatafraction is '20', legal is a number from 0 to 1",
            ),
            (
                "requestdistribution=exponential\nexponential.percentile=100",
                "line 2: exponential.percentile is '100', legal is a number above 0 and below 100",
            ),
            (
                "requestdistribution=exponential\nexponential.frac=0",
                "line 2: exponential.frac is '0', legal is a number above 0",
            ),
            (
                "workload=site.ycsb.workloads.TimeSeriesWorkload",
                "line 1: workload is 'site.ycsb.workloads.TimeSeriesWorkload', legal is a class whose name ends in \
                 CoreWorkload",
            ),
            ("recordcount=\\u00", "line 1: '\\u00' is not \\u and four hexadecimal digits of a character"),
        ] {
            assert_eq!(Workload::parse("x", text).unwrap_err().to_string(), message);
        }
    }

    #[test]
    fn a_users_file_sets_amounts_and_the_command_line_overrides_it() {
        let text = "recordcount=5\noperationcount=70\nmaxexecutiontime=3\nfieldlength=8";
        let chosen =
            Chosen { records: Some(5), operations: Some(70), seconds: Some(3), value_size: Some(80) };
        assert_eq!(Workload::parse("x", text).unwrap().chosen, chosen);
        let beside = |properties: &[&str]| {
            let properties: Vec<String> = properties.iter().map(|&text| text.to_owned()).collect();
            Workload::resolve_with("a", &properties)
        };
        let workload = beside(&["recordcount=9", "readproportion=1", "updateproportion = 0"]).unwrap();
        assert_eq!(
            (workload.records, workload.chosen.records, workload.chosen.operations),
            (9, Some(9), None)
        );
        assert_eq!((shares(&workload), workload.unused), ([1.0, 0.0, 0.0, 0.0, 0.0], vec![]));
        for (wrong, message) in [
            ("recordcount=0", "recordcount is '0', legal is a whole number from 1 on"),
            ("recordcount", "'recordcount' is no property"),
            ("", "'' is no property"),
            ("#a=b", "'#a=b' is no property"),
            ("a=b\nc=d", "is no property: write it like"),
            ("recordscount=7", "the property 'recordscount' has no effect here"),
        ] {
            let reported = beside(&[wrong]).unwrap_err().to_string();
            assert!(reported.contains(message), "{wrong}: {reported}");
        }
    }

    #[test]
    fn an_empty_mix_and_a_missing_file_are_errors() {
        let error = Workload::parse("x", "readproportion=0\nupdateproportion=0").unwrap_err();
        assert!(matches!(error, WorkloadError::NoOperations));
        let error = Workload::resolve("no/such/file").unwrap_err().to_string();
        assert!(
            error.contains("no/such/file") && error.contains("built in are a, b, c, d, e and f"),
            "{error}"
        );
        let error = Workload::resolve(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).unwrap_err();
        assert!(matches!(error, WorkloadError::NoProperty { .. }), "{error}");
    }
}
