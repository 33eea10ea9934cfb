//! Checks a document's links: each link to a local file must resolve, within the repository.

use super::Finding;

/// Returns every link to a missing file.
pub(super) fn findings(path: &str, text: &str, exists: impl Fn(&str) -> bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut in_fence = false;
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") || line.trim_start().starts_with("~~~") {
            in_fence = !in_fence;
            continue;
        }
        if in_fence {
            continue;
        }
        for link in links(&without_code(line)) {
            let what = match local_target(path, link) {
                Target::Elsewhere => continue,
                Target::Local(target) if exists(&target) => continue,
                Target::Local(_) => format!("`{link}` links to a missing file"),
                Target::Outside => format!("`{link}` leaves the repository"),
            };
            findings.push(Finding::new(path, index + 1, what, "link to a file of this repository"));
        }
    }
    findings
}

/// Destination of a link.
#[derive(Debug, PartialEq)]
enum Target {
    /// The link leads to another host, or to a heading of the same document.
    Elsewhere,
    /// The link leads to this path, which is relative to the repository's root.
    Local(String),
    Outside,
}

fn local_target(path: &str, link: &str) -> Target {
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
        seen(&findings(path, text, |path| existing.contains(&path)))
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
    fn code_other_hosts_and_headings_are_ignored() {
        let text =
            "`[a](b.md)` [c](https://d.e/f.md) [g](#h) [i](mailto:j@k)\n```\n[l](m.md)\n```\n[^n]: o.md\n";
        assert_eq!(seen_in("README.md", text), NOTHING);
    }
}
