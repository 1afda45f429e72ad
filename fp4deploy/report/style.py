"""Style sheet of report.html: no web fonts, no scripts, light, printable."""

CSS = """
:root { --ink:#212529; --soft:#6c757d; --line:#e9ecef; --wash:#f8f9fa; --blue:#4c6ef5; --green:#0ca678; }
* { box-sizing: border-box; }
body { margin:0; color:var(--ink); background:#fff; font:15px/1.55 system-ui,"Segoe UI",Roboto,sans-serif; }
main { max-width:1120px; margin:0 auto; padding:40px 28px 80px; }
h1 { font-size:28px; line-height:1.2; margin:0 0 4px; letter-spacing:-.01em; }
h2 { font-size:19px; margin:48px 0 12px; letter-spacing:-.005em; }
p { margin:0 0 10px; max-width:80ch; }
.sub { color:var(--soft); margin-bottom:22px; }
.lead { font-size:18px; max-width:70ch; margin-bottom:6px; }
ul { margin:0; padding-left:20px; max-width:90ch; } li { margin:3px 0; }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(190px,1fr)); gap:14px; margin:26px 0 8px; }
.tile { border:1px solid var(--line); border-radius:12px; padding:16px 18px; background:var(--wash); }
.tile b { display:block; font-size:27px; line-height:1.2; font-weight:650; font-variant-numeric:tabular-nums; }
.tile span { color:var(--soft); font-size:13px; }
.tile .name { display:block; color:var(--ink); font-size:13px; font-weight:600; margin-bottom:4px; }
.scroll { overflow-x:auto; }
table { border-collapse:collapse; width:100%; font-size:13.5px; font-variant-numeric:tabular-nums; }
th { text-align:left; color:var(--soft); font-weight:600; font-size:12.5px; border-bottom:2px solid var(--line); }
th,td { padding:8px 10px; vertical-align:top; }
td { border-bottom:1px solid var(--line); }
td.n,th.n { text-align:right; white-space:nowrap; }
tr:last-child td { border-bottom:0; }
code { font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace; }
td code { white-space:nowrap; }
pre { background:var(--wash); border:1px solid var(--line); border-radius:10px; padding:14px 16px; overflow-x:auto; }
.chip { display:inline-block;
  padding:1px 9px; border-radius:9px; font-size:12px; font-weight:600; white-space:nowrap; }
.ok { background:#e6fcf5; color:#087f5b; }
.idle { background:#fff4e6; color:#b35900; } .bad { background:#fff0f6; color:#a61e4d; }
.fp16 { background:#edf2ff; color:#364fc7; }
.nvfp4 { background:#e6fcf5; color:#087f5b; } .fp16_control { background:#f1f3f5; color:#495057; }
.nvfp4_ptq { background:#fff4e6; color:#d9480f; }
.note { color:var(--soft); font-size:13px; margin-top:10px; }
figure { margin:0; } figure svg { width:100%; height:auto; display:block; }
.heatmaps { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr)); gap:18px; }
.heatmaps img { width:100%; height:auto; display:block; }
.heatmaps figcaption { color:var(--soft); font-size:12.5px; }
.samples { display:grid; grid-template-columns:repeat(5,1fr); gap:10px 10px; }
.samples .head { font-size:12.5px; font-weight:600; color:var(--soft); }
.samples img { width:100%; display:block; border-radius:8px; }
.samples .caption { grid-column:1/-1; color:var(--soft); font-size:12.5px; margin:-2px 0 10px; }
.legend { display:flex; flex-wrap:wrap; gap:4px 16px; font-size:13px; margin:0 0 14px; }
.legend i { display:inline-block; width:11px; height:11px; border-radius:3px; margin-right:6px; vertical-align:-1px; }
.bar { position:relative; height:9px; min-width:150px; margin:3px 0; border-radius:5px; background:#f1f3f5; }
.bar i { position:absolute; inset:0 auto 0 0; border-radius:5px; }
.bar i.fp16 { background:var(--blue); }
.bar i.nvfp4 { background:var(--green); } .bar i.fp16_control { background:#adb5bd; }
.bar i.nvfp4_ptq { background:#f08c00; }
details { margin-top:10px; } summary { cursor:pointer; color:var(--soft); font-size:13.5px; }
dl { display:grid; grid-template-columns:max-content 1fr; gap:4px 18px; margin:0; font-size:14px; }
dt { color:var(--soft); } dd { margin:0; }
@media (max-width:760px) {
  main { padding:24px 16px 60px; } .samples { grid-template-columns:repeat(3,1fr); } .samples .head { display:none; }
}
@media print { main { max-width:none; padding:0; } h2 { break-after:avoid; } }
"""

COMPARISON = """
.run { white-space:nowrap; font-weight:600; }
.run i { display:inline-block; width:11px; height:11px; border-radius:3px; margin-right:6px; vertical-align:-1px; }
.runs { display:grid; gap:4px; margin:18px 0 8px; color:var(--soft); font-size:13.5px; overflow-wrap:anywhere; }
.runs .run { color:var(--ink); margin-right:6px; } .sub .run { color:var(--ink); }
.care { border-left:4px solid #E69F00; background:#fff9ec; padding:12px 16px; border-radius:0 10px 10px 0;
  margin-top:16px; font-size:14px; overflow-wrap:anywhere; }
.up { color:#00603f; } .down { color:#a33c00; font-weight:600; }
.swing { position:relative; height:9px; min-width:150px; margin:3px 0; border-radius:5px; background:#f1f3f5; }
.swing::after { content:""; position:absolute; left:50%; top:-1px; bottom:-1px; width:1px; background:#868e96; }
.swing i { position:absolute; top:0; bottom:0; border-radius:2px; print-color-adjust:exact; }
.pictures { margin:0 0 22px; break-inside:avoid; } .pictures .caption { font-size:13.5px; margin:0 0 6px; }
.answers { display:grid; grid-template-columns:repeat(auto-fit,minmax(130px,1fr)); gap:10px; }
.answers figure { max-width:360px; } .answers img { width:100%; display:block; border-radius:8px; }
.answers figcaption { font-size:12.5px; color:var(--soft); overflow-wrap:anywhere; }
.maps { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr)); gap:14px; align-items:start; }
.maps img { width:100%; max-width:640px; height:auto; display:block; }
th.n { white-space:normal; }
.settings td + td code { white-space:normal; overflow-wrap:anywhere; }
@media (max-width:760px) { figure.scroll svg { min-width:640px; } .answers { grid-template-columns:1fr 1fr; } }
.differs { background:#fff9ec; }
.run i, .care, .chip, .legend i, .bar i { print-color-adjust:exact; -webkit-print-color-adjust:exact; }
@media print {
  details:not([open]) { display:none; } .scroll { overflow:visible; }
  table { font-size:10.5px; } th,td { padding:4px 6px; }
  h2 { margin-top:26px; } figure.scroll { break-inside:avoid; } figure.scroll svg { min-width:0; }
  .maps { grid-template-columns:1fr 1fr; } .answers { grid-template-columns:repeat(auto-fit,minmax(100px,1fr)); }
  pre { white-space:pre-wrap; }
}
"""
