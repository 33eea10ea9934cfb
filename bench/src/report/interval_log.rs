//! Interval logs of latencies, in HdrHistogram's format 2, which its own tools can read and plot.
//!
//! A line holds the latencies, in nanoseconds, of the operations of one kind that ended in one interval. The line's tag
//! is the name of that kind. As the format requires, the maximum in the line is in milliseconds.

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, SystemTime};

use hdrhistogram::serialization::V2DeflateSerializer;
use hdrhistogram::serialization::interval_log::{
    IntervalLogWriter, IntervalLogWriterBuilder, IntervalLogWriterError, Tag,
};

use crate::driver::{ByKind, Interval, Kinds};

/// Merges the intervals of several threads, and writes them to a log in order.
pub struct IntervalLog<'a, W: io::Write> {
    writer: IntervalLogWriter<'a, 'a, W, V2DeflateSerializer>,
    every: Duration,
    kinds: Kinds,
    /// Intervals to which a thread may still contribute.
    open: BTreeMap<u32, ByKind>,
}

/// Maximum number of intervals by which one thread may lag behind another. If a thread lags further behind, its
/// contribution to an interval gets a separate line.
const APART_MAX: u32 = 2;

impl<'a, W: io::Write> IntervalLog<'a, W> {
    /// Starts a log with these kinds of operations. The log uses `serializer` as working space.
    ///
    /// # Errors
    /// Returns the error of the writer.
    pub fn begin(
        writer: &'a mut W,
        serializer: &'a mut V2DeflateSerializer,
        began: SystemTime,
        every: Duration,
        kinds: Kinds,
        comment: &str,
    ) -> io::Result<Self> {
        let mut header = IntervalLogWriterBuilder::new();
        header
            .add_comment("[Histogram log format version 1.3]")
            .add_comment(comment)
            .with_base_time(began)
            .with_start_time(began);
        header.with_max_value_divisor(NS_PER_MS);
        let writer = header.begin_log_with(writer, serializer)?;
        Ok(IntervalLog { writer, every, kinds, open: BTreeMap::new() })
    }

    /// Adds a thread's latencies of one interval to the log.
    ///
    /// # Errors
    /// Returns the error of the writer.
    pub fn add(&mut self, interval: Interval) -> io::Result<()> {
        self.open.entry(interval.number).or_default().merge(&interval.latencies);
        while let Some(first) = self.open.first_entry() {
            if first.key() + APART_MAX > interval.number {
                break;
            }
            let (number, latencies) = first.remove_entry();
            self.write(number, &latencies)?;
        }
        Ok(())
    }

    /// Writes the remaining intervals to the log.
    ///
    /// # Errors
    /// Returns the error of the writer.
    pub fn end(mut self) -> io::Result<()> {
        let open = std::mem::take(&mut self.open);
        open.into_iter().try_for_each(|(number, latencies)| self.write(number, &latencies))
    }

    fn write(&mut self, number: u32, latencies: &ByKind) -> io::Result<()> {
        for (kind, name) in self.kinds.iter().enumerate() {
            let Some(latencies) = latencies.of(kind) else { continue };
            let tag = Tag::new(name).expect("no name has a comma or a blank");
            let written = self.writer.write_histogram(
                latencies.histogram(),
                self.every * number,
                self.every,
                Some(tag),
            );
            written.map_err(|error| match error {
                IntervalLogWriterError::IoError(error) => error,
                IntervalLogWriterError::SerializeError(error) => io::Error::other(error.to_string()),
            })?;
        }
        Ok(())
    }
}

const NS_PER_MS: f64 = 1e6;

#[cfg(test)]
mod tests {
    use super::*;
    use hdrhistogram::Histogram;
    use hdrhistogram::serialization::Deserializer;
    use hdrhistogram::serialization::interval_log::{IntervalLogIterator, LogEntry};

    #[test]
    fn a_log_reads_back_in_order_whatever_the_order_of_threads() {
        let interval = |number, us| {
            let mut latencies = ByKind::default();
            latencies.record(0, Duration::from_micros(us));
            if number == 1 {
                latencies.record(4, Duration::from_micros(2 * us));
            }
            Interval { number, latencies }
        };
        let (mut text, mut serializer) = (Vec::new(), V2DeflateSerializer::new());
        let every = Duration::from_millis(500);
        let kinds = &["read", "update", "insert", "scan", "read-modify-write"];
        let began = SystemTime::now();
        let mut log =
            IntervalLog::begin(&mut text, &mut serializer, began, every, kinds, "a run").expect("memory");
        for interval in [interval(0, 10), interval(1, 20), interval(0, 30), interval(5, 50), interval(4, 40)]
        {
            log.add(interval).expect("memory");
        }
        log.end().expect("memory");
        let mut found = Vec::new();
        for entry in IntervalLogIterator::new(&text).map(|entry| entry.expect("well-formed")) {
            let LogEntry::Interval(line) = entry else { continue };
            let bytes = base64(line.encoded_histogram());
            let histogram: Histogram<u64> = Deserializer::new().deserialize(&mut &bytes[..]).expect("whole");
            let tag = line.tag().expect("a tag").as_str().to_owned();
            found.push((line.start_timestamp().as_millis(), tag, histogram.len(), line.max()));
        }
        let reported: Vec<_> = found.iter().map(|(at, tag, count, _)| (*at, &**tag, *count)).collect();
        let expected = [(0, "read", 2), (500, "read", 1), (500, "read-modify-write", 1), (2000, "read", 1)];
        assert_eq!(reported, [&expected[..], &[(2500, "read", 1)]].concat());
        assert!((found[0].3 - 0.03).abs() < 0.001, "30 us are 0.03 ms: {}", found[0].3);
    }

    /// Decodes base64 (RFC 4648).
    fn base64(text: &str) -> Vec<u8> {
        let six = |byte: u8| match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            _ => 63,
        };
        let digits: Vec<u8> = text.bytes().filter(|&byte| byte != b'=').map(six).collect();
        let groups = digits.chunks(4).flat_map(|group| {
            let bits = group.iter().fold(0u32, |bits, &six| bits << 6 | u32::from(six));
            let bytes = (bits << (6 * (4 - group.len()))).to_be_bytes();
            bytes[1..group.len()].to_vec()
        });
        groups.collect()
    }
}
