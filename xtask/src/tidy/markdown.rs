//! Checks a document's links: each link to a local file must resolve, within the repository, and each anchor must be
//! that of a heading.

use super::Finding;

/// Returns every link to a missing file or heading. `has_heading` takes a document's path and an anchor.
pub(super) fn findings(
    path: &str,
    text: &str,
    exists: impl Fn(&str) -> bool,
    has_heading: impl Fn(&str, &str) -> bool,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (index, line) in prose(text) {
        for link in links(&without_code(line)) {
            let (what, remedy) = match local_target(path, link) {
                Target::Elsewhere => continue,
                Target::Outside => ("leaves the repository", "link to a file of this repository"),
                Target::Local(target) if !exists(&target) => {
                    ("links to a missing file", "link to a file of this repository")
                }
                Target::Local(target) => match link.split_once('#') {
                    Some((_, anchor)) if target.ends_with(".md") && !has_heading(&target, anchor) => {
                        ("links to a missing heading", "link to a heading of that document")
                    }
                    _ => continue,
                },
            };
            findings.push(Finding::new(path, index + 1, format!("`{link}` {what}"), remedy));
        }
    }
    findings
}

/// Whether a document has a heading with this anchor, made from the heading as GitHub does.
pub(super) fn has_heading(text: &str, anchor: &str) -> bool {
    let anchor_of = |heading: &str| -> String {
        let title = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
        kept.map(|letter| if letter == ' ' { '-' } else { letter }).collect()
    };
    prose(text).any(|(_, line)| line.starts_with('#') && anchor_of(line) == anchor)
}

/// Returns the lines outside fenced blocks, each with its index (from 0).
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_fence = false;
    text.lines().enumerate().filter(move |(_, line)| {
        let is_fence = line.trim_start().starts_with("```") || line.trim_start().starts_with("~~~");
        in_fence ^= is_fence;
        !is_fence && !in_fence
    })
}

/// Where a link leads.
#[derive(Debug, PartialEq)]
enum Target {
    /// The link leads to another site.
    Elsewhere,
    /// The link leads to this path, which is relative to the repository's root.
    Local(String),
    Outside,
}

fn local_target(path: &str, link: &str) -> Target {
    if link.starts_with('#') {
        return Target::Local(path.to_owned());
    }
    let file = link.split(['#', '?']).next().unwrap_or_default();
    let has_scheme =
        file.split_once(':').is_some_and(|(scheme, _)| scheme.chars().all(char::is_alphanumeric));
    if file.is_empty() || has_scheme || file.starts_with("//") {
        return Target::Elsewhere;
    }
    let folder =
        if file.starts_with('/') { "" } else { path.rsplit_once('/').map_or("", |(folder, _)| folder) };
    let mut parts: Vec<&str> = Vec::new();
    for part in folder.split('/').chain(file.split('/')) {
        match part {
            "" | "." => {}
            ".." => {
                if parts.pop().is_none() {
                    return Target::Outside;
                }
            }
            part => parts.push(part),
        }
    }
    Target::Local(parts.join("/"))
}

/// Replaces the `code spans` of a line by blanks.
fn without_code(line: &str) -> String {
    let mut is_code = false;
    let blanked = line.chars().map(|letter| {
        is_code ^= letter == '`';
        if is_code { ' ' } else { letter }
    });
    blanked.collect()
}

/// Returns the targets of `[text](target)`, `[name]: target`, and the `src` and `href` of HTML.
fn links(line: &str) -> Vec<&str> {
    let mut links = Vec::new();
    for (opening, closing) in [("](", ')'), ("src=\"", '"'), ("href=\"", '"')] {
        for (at, _) in line.match_indices(opening) {
            links.extend(line[at + opening.len()..].split(closing).next());
        }
    }
    if line.starts_with('[') && !line.starts_with("[^") {
        links.extend(line.split_once("]: ").map(|(_, target)| target));
    }
    // A title may follow the target, and angle brackets may enclose the target.
    links.iter().filter_map(|link| Some(link.split_whitespace().next()?.trim_matches(['<', '>']))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::seen;
    use super::*;

    fn seen_in(path: &str, text: &str) -> Vec<String> {
        let existing = ["README.md", "docs/a.md", "docs/papers", "docs/picture.svg"];
        let has_heading = |path: &str, anchor: &str| path == "docs/a.md" && anchor == "h";
        seen(&findings(path, text, |path| existing.contains(&path), has_heading))
    }

    const NOTHING: [&str; 0] = [];

    #[test]
    fn a_link_resolves_from_its_document() {
        assert_eq!(
            seen_in("README.md", "[a](docs/a.md) and [b](docs/b.md#c)"),
            ["1: `docs/b.md#c` links to a missing file"]
        );
        assert_eq!(seen_in("docs/a.md", "[a](../README.md) [b](papers/) [c](/docs/a.md \"d\")"), NOTHING);
        assert_eq!(seen_in("docs/a.md", "a\n\n[b](docs/a.md)"), ["3: `docs/a.md` links to a missing file"]);
    }

    #[test]
    fn images_references_and_html_are_links() {
        let text =
            "[![a](docs/x.svg)](docs/a.md)\n[b]: docs/y.md\n<img src=\"docs/z.svg\"> <a href=\"docs/a.md\">";
        assert_eq!(
            seen_in("README.md", text),
            [
                "1: `docs/x.svg` links to a missing file",
                "2: `docs/y.md` links to a missing file",
                "3: `docs/z.svg` links to a missing file"
            ]
        );
    }

    #[test]
    fn a_link_stays_within_the_repository() {
        assert_eq!(seen_in("docs/a.md", "[a](../../b.md)"), ["1: `../../b.md` leaves the repository"]);
    }

    #[test]
    fn code_and_other_hosts_are_ignored() {
        let text = "`[a](b.md)` [c](https://d.e/f.md) [i](mailto:j@k)\n```\n[l](m.md)\n```\n[^n]: o.md\n";
        assert_eq!(seen_in("README.md", text), NOTHING);
    }

    #[test]
    fn an_anchor_is_that_of_a_heading() {
        assert_eq!(seen_in("README.md", "[a](docs/a.md#h)"), NOTHING);
        assert_eq!(seen_in("docs/a.md", "[a](#h)"), NOTHING);
        let missing = ["1: `docs/a.md#g` links to a missing heading"];
        assert_eq!(seen_in("README.md", "[a](docs/a.md#g)"), missing);
        assert_eq!(seen_in("README.md", "[a](#h)"), ["1: `#h` links to a missing heading"]);
        let text = "# One\n## Reads, and `kv get`\n```\n# no heading\n```\n";
        assert!(has_heading(text, "one") && has_heading(text, "reads-and-kv-get"));
        assert!(!has_heading(text, "no-heading"));
    }
}
